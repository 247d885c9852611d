"""The loss of several steps in a few numbers. Axes: N losses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.catalogue import MOST_ABOVE_START, NOISE_ENDS_BEFORE, NUM_AT_START, NUM_OF_NOISE, NUM_RECENT, NUM_SEARCHED
from tsemon.measures.sums import Partial, Partials, known, values_of

__all__ = [
    *("loss_before", "loss_max", "loss_mean", "loss_min", "loss_noise", "loss_nonfinite", "loss_recent", "loss_start"),
    "loss_std",
]


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


def recent_sums(losses_N: Tensor) -> Partials:
    """Sums over parts of each of the last 40 losses of (..., N), in float64, so that a step counts once."""
    losses_N = losses_N.detach().double()[..., -NUM_OF_NOISE - NOISE_ENDS_BEFORE :]
    missing = NUM_OF_NOISE + NOISE_ENDS_BEFORE - losses_N.shape[-1]
    losses_N = torch.nn.functional.pad(losses_N, (missing, 0), value=torch.nan)
    is_finite_N = losses_N.isfinite()
    return {
        "last": Partial(torch.where(is_finite_N, losses_N, 0.0)),
        "last_count": Partial(is_finite_N.double()),
    }


def recent_metrics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Finish `recent_sums`, merged over all parts."""
    steps_N = sums["last"] / sums["last_count"]  # NaN where no part has one
    before_N = steps_N[..., :NUM_OF_NOISE]
    is_known_N = ~before_N.isnan()
    count = is_known_N.sum(dim=-1)
    level = before_N.nanmean(dim=-1)
    deviation_N = torch.where(is_known_N, before_N - level[..., None], 0.0)
    noise = (deviation_N.square().sum(dim=-1) / count).sqrt()
    are_enough = count >= NUM_OF_NOISE / 2
    recent_N = steps_N[..., -NUM_RECENT:]
    num_recent = (~recent_N.isnan()).sum(dim=-1)
    are_lost = (num_recent < NUM_RECENT / 2) & (num_recent < (~steps_N.isnan()).sum(dim=-1))  # not only too early
    return {
        "loss_recent": torch.where(are_lost, torch.nan, recent_N.nanmean(dim=-1)),
        "loss_before": torch.where(are_enough, level, torch.nan),
        "loss_noise": torch.where(are_enough, noise, torch.nan),
    }


def without_stand_ins(losses_N: Tensor) -> Tensor:
    """Return (N,) with NaN for the first losses if they are equal and not positive.

    A loop may give 0 or -1 until it knows its loss.
    """
    place_N, is_finite_N = torch.arange(len(losses_N), device=losses_N.device), losses_N.isfinite()
    first = losses_N.index_select(0, torch.where(is_finite_N, place_N, len(losses_N) - 1).amin()[None])
    is_loss_N = is_finite_N & ((losses_N != first) | (first > 0))
    begins_at = torch.where(is_loss_N, place_N, len(losses_N)).amin()
    return torch.where(place_N < begins_at, torch.nan, losses_N.double())


def start_sums(losses_N: Tensor) -> Partials:
    """Sums over parts of each of the first 48 finite losses among the first 2048 of (..., N), in float64."""
    losses_N = losses_N.detach().double()[..., :NUM_SEARCHED]
    losses_N = torch.nn.functional.pad(losses_N, (0, max(NUM_AT_START - losses_N.shape[-1], 0)), value=torch.nan)
    is_lost_N, order_N = (~losses_N.isfinite()).int().sort(dim=-1, stable=True)
    is_first_N = is_lost_N[..., :NUM_AT_START] == 0
    first_N = losses_N.gather(-1, order_N[..., :NUM_AT_START])
    return {
        "first": Partial(torch.where(is_first_N, first_N, 0.0)),
        "first_count": Partial(is_first_N.double()),
    }


def start_metrics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Finish `start_sums`, merged over all parts."""
    first_N = sums["first"] / sums["first_count"]  # NaN where no part has one, which is at the end
    count = (~first_N.isnan()).sum(dim=-1, keepdim=True)
    # Not `nanmedian`, which deterministic mode forbids on a GPU. NaN is sorted to the end.
    median = first_N.sort(dim=-1).values.gather(-1, ((count - 1) // 2).clamp_min(0)).squeeze(-1)
    start = torch.maximum(torch.minimum(first_N[..., 0], MOST_ABOVE_START * median.abs()), median)
    return {"loss_start": torch.where(count.squeeze(-1) >= NUM_AT_START / 2, start, torch.nan)}


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


def loss_recent(losses_N: Tensor) -> Tensor:
    """Return the mean of the finite ones of the last 5 losses (..., N), (...) in float64. NaN if none is. (tsemon)"""
    return recent_metrics(values_of(recent_sums(losses_N)))["loss_recent"]


def loss_before(losses_N: Tensor) -> Tensor:
    """Return the mean of the 32 losses (..., N) that end 8 before the last one, (...) in float64.

    The level of the loss before the present change.                                                   (tsemon)

    NaN if fewer than 16 of them are there and finite.
    """
    return recent_metrics(values_of(recent_sums(losses_N)))["loss_before"]


def loss_noise(losses_N: Tensor) -> Tensor:
    """Return the standard deviation of the 32 losses (..., N) that end 8 before the last one, (...) >= 0 in float64.

    The noise of the loss from step to step before the present change.                                 (tsemon)

    NaN if fewer than 16 of them are there and finite.
    """
    return recent_metrics(values_of(recent_sums(losses_N)))["loss_noise"]


def loss_start(losses_N: Tensor) -> Tensor:
    """Return the loss that learning began at, of all losses (..., N) so far, (...) in float64.

    max(m, min(first loss, 5 |m|)), m: median of the first 48                               (tsemon)

    A few very high or very low first losses say nothing about learning. Only finite losses among the first 2048 count. If
    two are in the middle, the median is the lower one. NaN if fewer than 24 count.
    """
    return start_metrics(values_of(start_sums(losses_N)))["loss_start"]


def _of(name: str, losses_N: Tensor) -> Tensor:
    return loss_metrics(values_of(loss_sums(losses_N)))[name]
