"""The last samples of a number with their steps, which are kept to be shown: a trend that fits into a message."""

from __future__ import annotations

from collections.abc import Sequence

from tsemon_server.rules.columns import Numbers
from tsemon_server.rules.memory import Cell
from tsemon_server.rules.remembering import Span

SHOWN_SAMPLES = 8
"""Enough to see a trend, few enough to read in a message."""


def recent_at(row: int, span: Span, cell: Cell, numbers: Numbers) -> Cell:
    """Steps and values in turn, once a row was read; `cell` has those from before the span."""
    cell = cell[:]
    _add([cell], [numbers], span, row + 1)
    return cell


def keep_recent(span: Span, cells: Sequence[list[Cell]], columns: Sequence[Numbers]) -> None:
    """The same at the end of the span, of several numbers: their cells are changed in place."""
    for held in cells:
        if len(held) != 1:
            held[:] = [[]]
    _add([held[0] for held in cells], columns, span, span.stop)


def _add(cells: Sequence[Cell], columns: Sequence[Numbers], span: Span, stop: int) -> None:
    for row in range(max(span.start, stop - SHOWN_SAMPLES), stop):
        time = span.times[row - span.start]
        for cell, numbers in zip(cells, columns, strict=True):
            cell += (time, numbers[row])
    for cell in cells:
        del cell[: -2 * SHOWN_SAMPLES]
