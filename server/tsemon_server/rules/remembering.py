"""The nodes that remember: for each attempt and stack a memory reads its rows in the order of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from tsemon_server.rules.columns import Array, Numbers, Sheet, Sheets
from tsemon_server.rules.memory import Cell, Memory


class Span:
    """Rows of a batch that follow each other: frames of one attempt in one stack."""

    def __init__(self, start: int, steps: Sequence[int], cells: Sequence[list[Cell]]) -> None:
        self.start = start
        self.stop = start + len(steps)
        self.steps = steps
        self.times = [float(step) for step in steps]
        """The steps as memories keep them."""
        self.cells = cells
        """The cells before these rows: each memory has one, or one for each layer."""
        self.cells_after: list[list[Cell]] = []
        """The same after them; filled while the memories read, in their order."""


def of_numbers(memory: Memory, place: int) -> Callable[[Sequence[Span], Numbers], Numbers]:
    """The node of the memory in this place, which reads a column of numbers or of answers."""
    read = memory.read

    def remember(spans: Sequence[Span], column: Numbers) -> Numbers:
        found: Numbers = []
        for span in spans:
            held = span.cells[place]
            values = column if len(spans) == 1 else column[span.start : span.stop]
            seen, cell = read(held[0] if len(held) == 1 else [], values, span.times)
            found += seen
            span.cells_after.append([cell])
        return found

    return remember


def of_arrays(memory: Memory, place: int) -> Callable[[Sequence[Span], Sheets], Sheets]:
    """The same of a column of arrays: each layer has a cell of its own."""

    def remember(spans: Sequence[Span], column: Sheets) -> Sheets:
        found = [Sheet(sheet.rows, np.empty_like(sheet.values)) for sheet in column]
        sheet_of = {row: number for number, sheet in enumerate(column) for row in sheet.rows}
        places = {row: place for sheet in column for place, row in enumerate(sheet.rows)}
        for span in spans:
            held = span.cells[place]
            rows = [row for row in range(span.start, span.stop) if row in places]
            for number, together in groupby(rows, sheet_of.__getitem__):
                those = [*together]
                part = slice(places[those[0]], places[those[-1]] + 1)
                times = [span.times[row - span.start] for row in those]
                seen, held = _read_layers(memory, held, column[number].values[part], times)
                found[number].values[part] = seen
            span.cells_after.append(held)
        return found

    return remember


def _read_layers(memory: Memory, held: list[Cell], values: Array, times: Sequence[float]) -> tuple[Array, list[Cell]]:
    of_layers = values.reshape(len(values), -1).T.tolist()
    if len(held) != len(of_layers):  # another depth: another model
        held = [[] for _ in of_layers]
    read = [memory.read(cell, layer, times) for cell, layer in zip(held, of_layers, strict=True)]
    return np.array([seen for seen, _ in read]).T.reshape(values.shape), [cell for _, cell in read]
