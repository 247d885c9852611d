"""From rows, in the order in which they were logged, to frames in the order of steps.

A log may come back to a step: an evaluation is logged after training went on, a script writes one metric after the
other. So rows are joined by step within pieces of the log that are long, and begin and end at the same places however long
the log has become: what is made of a piece once is made of it always. A frame is named by the last row in it. If rows
of its step are added at the end of the log, another frame has them, and all that the first one had.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from tsemon.tools.importing.naming import Plan
from tsemon.tools.importing.source import Row
from tsemon.wire import Array, Frame

VALUES_OF_PIECE = 2**18
"""Numbers that one piece holds: a bound on memory."""


@dataclass(slots=True)
class JoinedStep:
    """What the rows of a step say together."""

    step: int
    last: int = 0
    time: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)
    """By name, how many values gave way to a later one, which is another."""

    def add(self, row: Row) -> None:
        self.last, self.time = row.ordinal, max(self.time, row.time)
        for name, value in row.values:
            before = self.values.setdefault(name, value)
            if before != value and not (math.isnan(before) and math.isnan(value)):
                self.values[name] = value
                self.replaced[name] = self.replaced.get(name, 0) + 1


def joined(rows: Iterable[Row], values_of_piece: int = VALUES_OF_PIECE) -> Iterator[JoinedStep]:
    """The rows by step, piece after piece."""
    steps: dict[int, JoinedStep] = {}
    num_values, newest = 0, 0
    for row in rows:
        if num_values >= values_of_piece and row.step != newest:
            yield from _in_order(steps)
            steps, num_values = {}, 0
        steps.setdefault(row.step, JoinedStep(row.step)).add(row)
        num_values += len(row.values)
        newest = row.step
    yield from _in_order(steps)


def _in_order(steps: dict[int, JoinedStep]) -> list[JoinedStep]:
    return [steps[number] for number in sorted(steps)]


def frames_of(step: JoinedStep, plan: Plan) -> Iterator[tuple[int, Frame]]:
    """The frames of one step, by band."""
    placed = [(place, value) for name, value in step.values.items() if (place := plan.places.get(name)) is not None]
    for band, group in groupby(sorted(placed, key=lambda item: item[0].band), lambda item: item[0].band):
        scalars: dict[str, float] = {}
        layers: dict[str, list[float]] = {}
        for (metric, entry, _), value in group:
            if entry is None:
                scalars[metric] = value
            else:
                layers.setdefault(metric, [math.nan] * plan.lengths[metric])[entry] = value
        packed = {metric: Array.of(values) for metric, values in layers.items()}
        yield band, Frame(step.last, step.step, step.time, scalars, packed)
