"""Many samples as few: the least, the mean and the largest value of samples that lie next to each other in steps.

Pure arithmetic on arrays. A cell may be a single sample, a rollup, or a bucket of a chart: cells of cells are cells.
Axes: C cells, E entries (layers, or layers x heads).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

_WEIGHT = 2.0**-32
"""Of one sample in a sum: fewer than 2**32 numbers add up to a number, whichever they are."""


class Cells(NamedTuple):
    """Sorted by first step."""

    spans: Ints
    """(C, 3): first step, last step, number of samples."""
    stats: Floats
    """(C, E, 4): least, mean and largest finite value, NaN where there is none, and the number of finite values."""


def of_samples(steps: Ints, values_CE: Floats) -> Cells:
    """A cell per sample."""
    spans = np.stack([steps, steps, np.ones_like(steps)], axis=1)
    finite = np.isfinite(values_CE)
    values = np.where(finite, values_CE, np.nan)
    return Cells(spans, np.stack([values, values, values, finite.astype(values_CE.dtype)], axis=-1))


def joined(parts: list[Cells]) -> Cells:
    """All cells of all parts in the order of steps. Where a part has fewer entries, its last ones have no value."""
    parts = [part for part in parts if len(part.spans)]
    width = max((part.stats.shape[1] for part in parts), default=1)
    spans = np.concatenate([np.empty((0, 3), np.int64), *(part.spans for part in parts)])
    stats = np.full((len(spans), width, 4), np.nan)
    stats[..., 3] = 0.0
    at = 0
    for part in parts:
        stats[at : at + len(part.spans), : part.stats.shape[1]] = part.stats
        at += len(part.spans)
    order = np.argsort(spans[:, 0], kind="stable")
    return Cells(spans[order], stats[order])


def merged(cells: Cells, starts: NDArray[np.intp]) -> Cells:
    """A cell for the cells from each of `starts` to the next; the first start is 0, no two are equal."""
    if not len(cells.spans):
        return cells
    first = np.minimum.reduceat(cells.spans[:, 0], starts)
    last = np.maximum.reduceat(cells.spans[:, 1], starts)
    spans = np.stack([first, last, np.add.reduceat(cells.spans[:, 2], starts)], axis=1)
    stats = cells.stats.astype(np.float64)
    num_finite = stats[..., 3]
    has_none = num_finite == 0
    total = np.add.reduceat(num_finite, starts)
    least = np.minimum.reduceat(np.where(has_none, np.inf, stats[..., 0]), starts)
    most = np.maximum.reduceat(np.where(has_none, -np.inf, stats[..., 2]), starts)
    weights = num_finite * _WEIGHT
    with np.errstate(over="ignore"):  # by the last rounding, see below
        mean = (
            np.add.reduceat(np.where(has_none, 0.0, stats[..., 1] * weights), starts) / np.maximum(total, 1) / _WEIGHT
        )
    mean = np.clip(mean, least, most)  # it may round to just outside
    is_empty = total == 0
    least[is_empty] = mean[is_empty] = most[is_empty] = np.nan
    return Cells(spans, np.stack([least, mean, most, total], axis=-1))


def rolled_up(steps: Ints, values_CE: Floats, shift: int) -> Cells:
    """Cells of the samples whose steps are the same but for the last `shift` bits; `steps` never falls."""
    return merged(of_samples(steps, values_CE), starts_of(steps >> shift))


def starts_of(ids: Ints) -> NDArray[np.intp]:
    """Where equal ids begin."""
    return np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))[: len(ids)]


def smallest_shift(first_step: int, last_step: int, most: int) -> int:
    """The finest grid of steps on which at most `most` spans reach from one step to the other."""
    shift = max(0, ((last_step - first_step) // most).bit_length() - 1)
    while (last_step >> shift) - (first_step >> shift) >= most:
        shift += 1
    return shift
