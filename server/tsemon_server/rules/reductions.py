"""From the layers of a model, or the heads of a block, to one number. NaN is what could not be measured: it is left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsemon_server.rules.parts import Part

Array = NDArray[np.float64]
Reduction = Callable[[Array], float]

FLAT = "slope", "r_squared", "fall", "fall_r_squared"
"""Reductions over depth that fit a line."""
MIN_POINTS = 4
"""A line through fewer points fits whatever it is given: three blocks and their input are the least."""


def reduction(part: Part, *, along: str) -> Reduction:
    """The function that a definition names, such as `min`, `{quantile: 0.9}` or `slope`."""
    if isinstance(part.data, dict):
        if "index" in part:
            place = part.has_keys(["index"])["index"].whole(-10_000, 10_000)
            return lambda values: float(values[place]) if -len(values) <= place < len(values) else math.nan
        if "first_above" in part and along == "layers":
            bound = part.has_keys(["first_above"])["first_above"].number()
            return lambda values: float(next(iter(np.flatnonzero(values > bound)), math.nan))
        share = part.has_keys(["quantile"])["quantile"].share()
        return lambda values: quantile(_known(values), share)
    return _NAMED[part.one_of([name for name in _NAMED if along == "layers" or name not in FLAT])]


def _known(values: Array) -> Array:
    known = values == values  # NaN is not
    return values if known.all() else values[known]


def quantile(known: Array, share: float) -> float:
    """Between the two nearest in proportion; what `numpy.quantile` gives, in a tenth of the time for few values."""
    if not len(known):
        return math.nan
    ordered = sorted(known.tolist())
    place = share * (len(ordered) - 1)
    below = int(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return float(low if low == high else low + (place - below) * (high - low))


def _over_known(take: Callable[[Any], Any]) -> Reduction:
    def reduce(values: Array) -> float:
        known = _known(values)
        return float(take(known)) if len(known) else math.nan

    return reduce


def fit(values: Array, *, only_fall: bool = False) -> tuple[float, float]:
    """Slope per layer and r² of the least-squares line; NaN with fewer than four finite values.

    `only_fall`: over the part that ends where the values come within one unit of their lowest. Below a fall lies a
    plateau, such as the rounding of the model's precision, that says nothing of how it was reached.
    """
    x = np.flatnonzero(np.isfinite(values))
    if len(x) < MIN_POINTS:
        return math.nan, math.nan
    y = values[x]
    if only_fall:
        end = max(int(np.argmax(y <= y.min() + 1)) + 1, MIN_POINTS)
        x, y = x[:end], y[:end]
    x_centred, y_centred = x - x.mean(), y - y.mean()
    slope = float(x_centred @ y_centred / (x_centred @ x_centred))
    total = float(y_centred @ y_centred)
    rest = y_centred - slope * x_centred
    return slope, (1 - float(rest @ rest) / total if total > 0 else 0.0)


_NAMED: dict[str, Reduction] = {
    "min": _over_known(lambda known: known.min()),
    "max": _over_known(lambda known: known.max()),
    "mean": _over_known(lambda known: known.sum() / len(known)),
    "sum": _over_known(lambda known: known.sum()),
    "median": lambda values: quantile(_known(values), 0.5),
    "first": lambda values: float(values[0]) if len(values) else math.nan,
    "last": lambda values: float(values[-1]) if len(values) else math.nan,
    "slope": lambda values: fit(values)[0],
    "r_squared": lambda values: fit(values)[1],
    "fall": lambda values: fit(values, only_fall=True)[0],
    "fall_r_squared": lambda values: fit(values, only_fall=True)[1],
}
