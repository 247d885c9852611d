"""The norm of the gradient in several steps in a few numbers. Axes: N norms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.catalogue import NUM_RECENT
from tsemon.measures.sums import Partial, Partials, known, values_of

__all__ = ["grad_norm_max", "grad_norm_mean", "grad_norm_nonfinite", "grad_norm_recent"]


def grad_norm_sums(norms_N: Tensor, recent_N: Tensor) -> Partials:
    """Sums over the norms since the last sample and over the most recent ones, in float64.

    Merged over ranks they give means over ranks and the largest norm of any rank. If all ranks clip the same gradient, all
    these norms are equal.
    """
    norms_N, recent_N = norms_N.detach().double(), recent_N.detach().double()
    is_finite_N, is_recent_N = norms_N.isfinite(), recent_N.isfinite()
    return {
        "count": Partial(is_finite_N.sum(dim=-1).double()),
        "sum": Partial(torch.where(is_finite_N, norms_N, 0.0).sum(dim=-1)),
        "max": Partial(torch.where(is_finite_N, norms_N, -torch.inf).amax(dim=-1), "max"),
        "nonfinite": Partial((~is_finite_N).sum(dim=-1).double(), "max"),
        "recent_count": Partial(is_recent_N.sum(dim=-1).double()),
        "recent_sum": Partial(torch.where(is_recent_N, recent_N, 0.0).sum(dim=-1)),
    }


def grad_norm_metrics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Finish `grad_norm_sums`, merged over all parts."""
    return {
        "grad_norm_mean": sums["sum"] / sums["count"],
        "grad_norm_max": known(sums["max"]),
        "grad_norm_nonfinite": sums["nonfinite"],
        "grad_norm_recent": sums["recent_sum"] / sums["recent_count"],
    }


def grad_norm_mean(norms_N: Tensor) -> Tensor:
    """Return the mean of the norms (..., N) that are finite, (...) >= 0 in float64. NaN if none is.        (tsemon)"""
    return _of("grad_norm_mean", norms_N)


def grad_norm_max(norms_N: Tensor) -> Tensor:
    """Return the max over the norms (..., N) that are finite, (...) >= 0 in float64. NaN if none is.       (tsemon)"""
    return _of("grad_norm_max", norms_N)


def grad_norm_nonfinite(norms_N: Tensor) -> Tensor:
    """Return the number of norms (..., N) that are NaN or infinite, (...) in float64.                      (tsemon)"""
    return _of("grad_norm_nonfinite", norms_N)


def grad_norm_recent(norms_N: Tensor) -> Tensor:
    """Return the mean of the finite ones of the last 5 norms (..., N), (...) >= 0 in float64. NaN if none is. (tsemon)"""
    return _of("grad_norm_recent", norms_N)


def _of(name: str, norms_N: Tensor) -> Tensor:
    return grad_norm_metrics(values_of(grad_norm_sums(norms_N, norms_N[..., -NUM_RECENT:])))[name]
