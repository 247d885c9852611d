"""A program at work on the frames of a batch, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tsemon_server.rules.columns import Sheet, read_sheets
from tsemon_server.rules.memory import Cell
from tsemon_server.rules.program import Measure, Program, Term, View
from tsemon_server.rules.recent import keep_recent, recent_at
from tsemon_server.rules.remembering import Span


class Plan:
    """The order of work: the columns of the terms in `always`, and all that memories read, are computed each time."""

    def __init__(self, program: Program, always: Sequence[Term]) -> None:
        self.nodes = program.nodes
        self.arrays = [(index, node.measure) for index, node in enumerate(self.nodes) if node.measure is not None]
        self.shown = {key: term.index for key, term in program.shown.items()}
        self.num_memories = len(program.memories)
        needed = program.needed_for(always)
        arrays = {index for index, _ in self.arrays}
        self.steps = [(index, self.nodes[index]) for index in sorted(needed - arrays)]

    def fresh_cells(self) -> list[list[Cell]]:
        return [[] for _ in range(self.num_memories + len(self.shown))]


class Batch:
    """Frames that are read together, and their columns. Each view is a row; the spans have all rows in their order.

    The other columns, such as the evidence of an alert, are computed on demand.
    """

    def __init__(self, plan: Plan, views: Sequence[View], spans: Sequence[Span]) -> None:
        self._plan = plan
        self._views = views
        self._columns: list[Any] = [None] * len(plan.nodes)
        columns = self._columns
        with np.errstate(all="ignore"):  # a run that fails has numbers of any size
            arrays = read_sheets([_arrays(measure, views) for _, measure in plan.arrays])
            for (index, _), sheets in zip(plan.arrays, arrays, strict=True):
                columns[index] = sheets
            for index, node in plan.steps:
                if node.compute is not None:
                    columns[index] = node.compute(views, columns)
                elif node.remember is not None:
                    columns[index] = node.remember(spans, columns[node.reads[0]])

    def __getitem__(self, node: int) -> Any:
        """The column of a node."""
        column = self._columns[node]
        if column is None:
            made = self._plan.nodes[node]
            for read in made.reads:
                self[read]
            assert made.compute is not None
            with np.errstate(all="ignore"):
                column = self._columns[node] = made.compute(self._views, self._columns)
        return column

    def recent_at(self, row: int, span: Span, key: str) -> Cell:
        """The last samples of a number, up to a row."""
        place = [*self._plan.shown].index(key)
        held = span.cells[self._plan.num_memories + place]
        return recent_at(row, span, held[0] if len(held) == 1 else [], self[self._plan.shown[key]])

    def cells_after(self, span: Span) -> list[list[Cell]]:
        """The cells after the rows of a span. `recent_at` cannot be called any more after this."""
        shown = span.cells[self._plan.num_memories :]
        keep_recent(span, shown, [self._columns[node] for node in self._plan.shown.values()])
        return [*span.cells_after, *shown]


def _arrays(measure: Measure, views: Sequence[View]) -> Sequence[Any]:
    """The array of each view, or None."""
    name = measure.name
    if measure.kind == "layers":
        return [view.layers.get(name) for view in views]
    return [view.heads.get(name) for view in views]


class Row:
    """One row of all columns: floats, answers, and arrays, which are empty if missing."""

    def __init__(self, batch: Batch, row: int) -> None:
        self._batch = batch
        self._row = row

    def __getitem__(self, node: int) -> Any:
        column = self._batch[node]
        if column and not isinstance(column[0], Sheet):
            return column[self._row]
        found = (sheet.values[sheet.rows.index(self._row)] for sheet in column if self._row in sheet.rows)
        return next(found, np.empty(0))
