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
    first = max(span.start, row + 1 - SHOWN_SAMPLES)
    return _with(cell[:], span.times[first - span.start : row + 1 - span.start], numbers[first : row + 1])


def keep_recent(span: Span, cells: Sequence[list[Cell]], columns: Sequence[Numbers]) -> None:
    """The same at the end of the span, of several numbers: their cells are changed in place."""
    first = max(span.start, span.stop - SHOWN_SAMPLES)
    times = span.times[first - span.start :]
    for held, numbers in zip(cells, columns, strict=True):
        if len(held) != 1:
            held[:] = [[]]
        _with(held[0], times, numbers[first : span.stop])


def _with(cell: Cell, times: Sequence[float], numbers: Numbers) -> Cell:
    for time, number in zip(times, numbers, strict=True):
        cell += (time, number)
    del cell[: -2 * SHOWN_SAMPLES]
    return cell
