"""A frame as named numbers, which is all that other tools have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from tsemon.catalogue import NOT_PLOTTED
from tsemon.errors import InvalidArgument
from tsemon.wire import Frame

PREFIX = "tsemon/"
"""Before each name, so that none is one of the user's own. `tsemon import` knows it."""

Layers = Literal["aggregates", "each", "none"]


def checked_layers(layers: object) -> Layers:
    """Raises InvalidArgument for what `layers=` cannot be."""
    if layers not in ("aggregates", "each", "none"):
        raise InvalidArgument(f"layers= is 'aggregates', 'each' or 'none', got {layers!r}")
    return layers


def numbers_of(frame: Frame, layers: Layers) -> dict[str, float]:
    """All scalars that are quantities; of each layered metric the lowest, mean, highest and last layer, or every entry."""
    numbers = {PREFIX + name: value for name, value in frame.scalars.items() if name not in NOT_PLOTTED}
    if layers == "none":
        return numbers
    for metric, array in frame.layers.items():
        entries = array.tolist()
        named = _each(entries) if layers == "each" else _aggregates(entries)
        numbers.update((f"{PREFIX}{metric}/{name}", value) for name, value in named)
    return numbers


def _each(entries: list[float]) -> Iterator[tuple[str, float]]:
    for number, value in enumerate(entries):
        yield f"{number:02}", value


def _aggregates(entries: list[float]) -> Iterator[tuple[str, float]]:
    if not entries:
        return
    # A layer that is not measured is NaN, and hides nothing of the others.
    known = [value for value in entries if not math.isnan(value)] or [math.nan]
    yield "min", min(known)
    yield "mean", sum(known) / len(known)
    yield "max", max(known)
    yield "last", entries[-1]
