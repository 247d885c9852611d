"""From the layers of a model, or the heads of a block, to one number. NaN is what could not be measured: it is left out.

All rows of a sheet are reduced in one call if the result is the same to the last bit: a contiguous row is summed in the same
order either way. Rows with NaN in different places are reduced one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tsemon_server.rules import costs
from tsemon_server.rules.columns import Array, Numbers, Sheet
from tsemon_server.rules.parts import Part

Reduction = Callable[[Sheet], Numbers]
"""From a sheet of (rows, layers) to one number a row."""
T = TypeVar("T")
Layers = tuple[int, ...]
Fit = tuple[float, float]
"""Slope per layer and r²."""

FLAT = "slope", "r_squared", "fall", "fall_r_squared"
"""Reductions over depth that fit a line."""
MIN_POINTS = 4
"""A line through fewer points fits whatever it is given: three blocks and their input are the least."""


def reduction(part: Part, *, along: str) -> Reduction:
    """The function that a definition names, such as `min`, `{quantile: 0.9}` or `slope`."""
    if isinstance(part.data, dict):
        if "index" in part:
            return _at(part.has_keys(["index"])["index"].whole(-10_000, 10_000))
        if "first_above" in part and along == "layers":
            bound = part.has_keys(["first_above"])["first_above"].number()
            return lambda sheet: [float(next(iter(np.flatnonzero(row)), math.nan)) for row in sheet.values > bound]
        return _quantile(part.has_keys(["quantile"])["quantile"].share())
    return _NAMED[part.one_of([name for name in _NAMED if along == "layers" or name not in FLAT])]


def work_of(part: Part, *, of_axes: int) -> costs.Work:
    """The cost of a reduction. Rows with different numbers of NaN are reduced by themselves."""
    us_a_row, us_a_value = (0.0, 0.1) if isinstance(part.data, dict) else _US.get(part.data, _US_OF_FIT)
    return costs.reduction(us_a_row, us_a_value, of_axes=of_axes)


_US = {
    **dict.fromkeys(("min", "max", "first", "last"), (0.0, 0.01)),
    **dict.fromkeys(("mean", "sum"), (3.5, 0.03)),
    "median": (0.0, 0.1),
}
"""CPU time for each row and for each value."""
_US_OF_FIT = 30.0, 0.0


def _at(place: int) -> Reduction:
    def reduce(sheet: Sheet) -> Numbers:
        num_rows, num_layers = sheet.values.shape
        is_there = -num_layers <= place < num_layers
        found: Numbers = sheet.values[:, place].tolist() if is_there else [math.nan] * num_rows
        return found

    return reduce


def _quantile(share: float) -> Reduction:
    def reduce(sheet: Sheet) -> Numbers:
        rows = sheet.values.tolist()
        if not sheet.is_whole:
            rows = [[x for x in row if x == x] for row in rows]
        return [quantile(row, share) for row in rows]

    return reduce


def quantile(known: Sequence[float], share: float) -> float:
    """Between the two nearest in proportion; what `numpy.quantile` gives, in a tenth of the time for few values."""
    if not known:
        return math.nan
    ordered = sorted(known)
    place = share * (len(ordered) - 1)
    below = int(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return low if low == high else low + (place - below) * (high - low)


def _over_known(take: Callable[[Array], Array]) -> Reduction:
    """`take` reduces the rows of a matrix without NaN."""

    def reduce(sheet: Sheet) -> Numbers:
        values = sheet.values
        if sheet.is_whole:
            whole: Numbers = take(values).tolist()
            return whole
        is_known = values == values
        num_known = np.count_nonzero(is_known, axis=1)
        found = np.full(len(values), math.nan)
        for num in {*num_known.tolist()} - {0}:
            rows = num_known == num
            found[rows] = take(values[rows][is_known[rows]].reshape(-1, num))
        return [*found.tolist()]

    return reduce


def _of_known(take: Callable[[Layers, Array], list[T]], values: Array, is_known: NDArray[np.bool_]) -> list[T]:
    """Apply `take` to the known values of each row; in one call if the same layers are known in all rows."""
    first = is_known[0]
    if not (is_known == first).all():
        rows = zip(values, is_known, strict=True)
        return [found for row, known in rows for found in _of_known(take, row[None], known[None])]
    return take(tuple(np.flatnonzero(first).tolist()), np.compress(first, values, axis=1))


@lru_cache(maxsize=1024)
def _all_layers(num_layers: int) -> Layers:
    return tuple(range(num_layers))


def _end(is_lowest: bool) -> Reduction:
    end, farthest = (np.minimum, math.inf) if is_lowest else (np.maximum, -math.inf)

    def reduce(sheet: Sheet) -> Numbers:
        if sheet.is_whole:
            return sheet.ends[0 if is_lowest else 1]
        is_known = sheet.values == sheet.values
        found = end.reduce(np.where(is_known, sheet.values, farthest), axis=1)
        return [*np.where(is_known.any(axis=1), found, math.nan).tolist()]

    return reduce


def fits(sheet: Sheet, *, only_fall: bool) -> list[Fit]:
    """The least-squares line of each row; NaN with fewer than four finite values.

    `only_fall`: over the part that ends where the values come within one unit of their lowest. Below a fall lies a
    plateau, such as the rounding of the model's precision, that says nothing of how it was reached.
    """
    if only_fall not in sheet.notes:
        take = _falls if only_fall else _lines
        if sheet.is_finite:
            sheet.notes[only_fall] = take(_all_layers(sheet.values.shape[1]), sheet.values)
        else:
            sheet.notes[only_fall] = _of_known(take, sheet.values, np.isfinite(sheet.values))
    found: list[Fit] = sheet.notes[only_fall]
    return found


def _falls(layers: Layers, y: Array) -> list[Fit]:
    if len(layers) < MIN_POINTS:
        return _lines(layers, y)
    near_lowest = (y <= np.minimum.reduce(y, axis=1, keepdims=True) + 1).argmax(axis=1)
    ends = [max(place + 1, MIN_POINTS) for place in near_lowest.tolist()]
    if len({*ends}) == 1:
        return _lines(layers[: ends[0]], y[:, : ends[0]])
    found = [_NO_FIT] * len(y)
    for end in {*ends}:
        rows = [row for row, its_end in enumerate(ends) if its_end == end]
        for row, fit in zip(rows, _lines(layers[:end], y[rows, :end]), strict=True):
            found[row] = fit
    return found


def _lines(layers: Layers, y: Array) -> list[Fit]:
    if len(layers) < MIN_POINTS:
        return [_NO_FIT] * len(y)
    x, x_squared = _centred(layers)
    y = y - np.add.reduce(y, axis=1, keepdims=True) / len(layers)
    slopes = _dots(x[None], y) / x_squared
    rests = y - slopes[:, None] * x
    sums = zip(slopes.tolist(), _dots(rests, rests).tolist(), _dots(y, y).tolist(), strict=True)
    return [(slope, 1 - rest / total if total > 0 else 0.0) for slope, rest, total in sums]


@lru_cache(maxsize=1024)
def _centred(layers: Layers) -> tuple[Array, float]:
    x = np.array(layers) - np.mean(layers)
    return x, float(x @ x)


def _dots(left: Array, right: Array) -> Array:
    """Products of rows. `@` uses the same routine as for two vectors; einsum does not, and its last bits differ."""
    if len(left) == len(right) == 1:  # a tenth of the time
        return np.array([left[0] @ right[0]])
    found: Array = (left[:, None, :] @ right[:, :, None])[:, 0, 0]
    return found


_NO_FIT = math.nan, math.nan
_NAMED: dict[str, Reduction] = {
    "min": _end(is_lowest=True),
    "max": _end(is_lowest=False),
    "mean": _over_known(lambda values: np.add.reduce(values, axis=1) / values.shape[1]),
    "sum": _over_known(lambda values: np.add.reduce(values, axis=1)),
    "median": _quantile(0.5),
    "first": _at(0),
    "last": _at(-1),
    "slope": lambda sheet: [slope for slope, _ in fits(sheet, only_fall=False)],
    "r_squared": lambda sheet: [r_squared for _, r_squared in fits(sheet, only_fall=False)],
    "fall": lambda sheet: [slope for slope, _ in fits(sheet, only_fall=True)],
    "fall_r_squared": lambda sheet: [r_squared for _, r_squared in fits(sheet, only_fall=True)],
}
