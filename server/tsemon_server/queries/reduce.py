"""Many samples as few: pure arithmetic on arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Buckets(NamedTuple):
    """One entry per bucket. NaN where a bucket has no finite value."""

    step: Ints
    """The step of the bucket's middle sample."""
    min: Floats
    mean: Floats
    max: Floats
    nonfinite: Ints
    """How many samples of the bucket are NaN or infinite."""


def bucketed(steps: Ints, values: Floats, points: int) -> Buckets:
    """At most `points` buckets over samples in step order.

    Where more samples than points came, the first and the last sample stand alone, because charts and people read the
    ends, and `points - 2` buckets of equal count (give or take one) lie between.
    """
    num_samples = len(steps)
    if num_samples <= points:
        starts = np.arange(num_samples + 1)
    else:
        between = 1 + np.arange(points - 1) * (num_samples - 2) // (points - 2)
        starts = np.concatenate(([0], between, [num_samples]))
    finite = np.isfinite(values)
    num_finite = _sums(finite.astype(np.int64), starts)
    is_empty = num_finite == 0
    least = _over(np.minimum, np.where(finite, values, np.inf), starts)
    most = _over(np.maximum, np.where(finite, values, -np.inf), starts)
    least[is_empty] = most[is_empty] = np.nan
    mean = _sums(np.where(finite, values, 0.0), starts) / np.where(is_empty, np.nan, num_finite)
    sizes = np.diff(starts)
    # A sum may round to just outside its bucket, and overflow where the values do not.
    return Buckets(steps[_middles(starts)], least, np.clip(mean, least, most), most, sizes - num_finite)


def column_means(steps: Ints, values_TL: Floats, columns: int) -> tuple[Ints, Floats]:
    """The mean per layer of the finite values in at most `columns` equal spans, and their middle steps."""
    num_samples = len(steps)
    columns = min(columns, num_samples)
    starts = np.arange(columns + 1) * num_samples // max(columns, 1)
    finite = np.isfinite(values_TL)
    num_finite = _sums(finite.astype(np.int64), starts)
    sums = _sums(np.where(finite, values_TL, 0.0), starts)
    return steps[_middles(starts)], sums / np.where(num_finite == 0, np.nan, num_finite)


def _middles(starts: Ints) -> Ints:
    return (starts[:-1] + starts[1:] - 1) // 2


def _sums(values: NDArray[Any], starts: Ints) -> NDArray[Any]:
    return _over(np.add, values, starts)


def _over(function: np.ufunc, values: NDArray[Any], starts: Ints) -> NDArray[Any]:
    """`function` over each span between two starts; no span is empty."""
    if len(starts) == 1:
        return values[:0]
    result: NDArray[Any] = function.reduceat(values, starts[:-1], axis=0)
    return result
