"""The range of a metric in healthy recorded runs, which depends on the relative depth of the layer.

scripts/healthy_band.py computes the numbers in healthy.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

HEALTHY: Mapping[str, Mapping[str, Any]] = json.loads(files(__package__).joinpath("healthy.json").read_text())


def extent(metric: str) -> tuple[float, float] | None:
    """The lowest and the highest value of the range over all depths; None if the metric has no range."""
    found = HEALTHY.get(metric)
    return None if found is None else (min(found["low"]), max(found["high"]))


def farthest_below(metric: str, values: Sequence[float | None]) -> int | None:
    """The layer that is farthest below the range at its depth in a model with one stack; None if no layer is below."""
    if metric not in HEALTHY or len(values) < 2:
        return None
    low = HEALTHY[metric]["low"]
    edges = (_between(low, layer / (len(values) - 1)) for layer in range(len(values)))
    ratios = {layer: x / edge for layer, (x, edge) in enumerate(zip(values, edges, strict=True)) if x is not None}
    below = {layer: ratio for layer, ratio in ratios.items() if ratio < 1}
    return min(below, key=below.__getitem__, default=None)


def _between(values: Sequence[float], depth: float) -> float:
    """The value at a depth from 0 to 1, on a straight line between logarithms."""
    at = depth * (len(values) - 1)
    first = min(int(at), len(values) - 2)
    return float(values[first] * (values[first + 1] / values[first]) ** (at - first))
