"""The loss of several steps in a few numbers. Axes: N losses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.measures.sums import Partial, Partials, known, values_of

__all__ = ["loss_max", "loss_mean", "loss_min", "loss_nonfinite", "loss_std"]


def loss_sums(losses_N: Tensor) -> Partials:
    """Sums over losses (..., N), in float64. The number of losses that are not finite merges as a maximum."""
    losses_N = losses_N.detach().double()
    is_finite_N = losses_N.isfinite()
    finite_N = torch.where(is_finite_N, losses_N, 0.0)
    return {
        "count": Partial(is_finite_N.sum(dim=-1).double()),
        "sum": Partial(finite_N.sum(dim=-1)),
        "squares": Partial(finite_N.square().sum(dim=-1)),
        "min": Partial(torch.where(is_finite_N, losses_N, torch.inf).amin(dim=-1), "min"),
        "max": Partial(torch.where(is_finite_N, losses_N, -torch.inf).amax(dim=-1), "max"),
        "nonfinite": Partial((~is_finite_N).sum(dim=-1).double(), "max"),
    }


def loss_metrics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Finish `loss_sums`, merged over all parts."""
    mean = sums["sum"] / sums["count"]
    return {
        "loss_mean": mean,
        "loss_min": known(sums["min"]),
        "loss_max": known(sums["max"]),
        "loss_std": (sums["squares"] / sums["count"] - mean.square()).clamp_min(0.0).sqrt(),
        "loss_nonfinite": sums["nonfinite"],
    }


def loss_mean(losses_N: Tensor) -> Tensor:
    """Return the mean of the losses (..., N) that are finite, (...) in float64. NaN if none is.        (tsemon)"""
    return _of("loss_mean", losses_N)


def loss_min(losses_N: Tensor) -> Tensor:
    """Return the min over the losses (..., N) that are finite, (...) in float64. NaN if none is.      (tsemon)"""
    return _of("loss_min", losses_N)


def loss_max(losses_N: Tensor) -> Tensor:
    """Return the max over the losses (..., N) that are finite, (...) in float64. NaN if none is.      (tsemon)"""
    return _of("loss_max", losses_N)


def loss_std(losses_N: Tensor) -> Tensor:
    """Return the standard deviation of the losses (..., N) that are finite, (...) >= 0 in float64.

    sqrt(mean of squares - square of mean)                                                 (tsemon)

    0 for one loss, NaN if none is finite. Takes losses as they are: of losses near 1e8 a spread of 1 is lost.
    """
    return _of("loss_std", losses_N)


def loss_nonfinite(losses_N: Tensor) -> Tensor:
    """Return the number of losses (..., N) that are NaN or infinite, (...) in float64.                 (tsemon)"""
    return _of("loss_nonfinite", losses_N)


def _of(name: str, losses_N: Tensor) -> Tensor:
    return loss_metrics(values_of(loss_sums(losses_N)))[name]
