"""The table of set-ups: its rows, its columns, and what goes into a cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from scripts import compatibility
from scripts.compatibility import COLUMNS

BLOCKS, BIT_EQUAL, *FAMILIES, GRAPHS, CLEAN, COPIES = COLUMNS
HIDDEN_STATES, ATTENTION, FEED_FORWARD, OUTPUTS, PARAMETERS, GRADIENTS, UPDATES, SATURATION = FAMILIES
COMPILED = tuple(column for column in COLUMNS if column != BLOCKS)
EAGER = tuple(column for column in COMPILED if column != GRAPHS)

YES, IN_PART, NO, WRONG = "yes", "in part", "no", "wrong"


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One line of the table."""

    kind: str
    """One file has the tests of a kind, so one process has seen all of it."""
    name: str
    columns: Sequence[str] = EAGER
    """What is tried on it; the other cells hold a dash."""
    like: str = ""
    """The row of which this is a variation. That one is tried in `make test`, both are in `make test-all`."""


@dataclass(frozen=True)
class Cell:
    answer: str
    words: str = ""
    """What monitor.status says about it."""


NOTHING = Cell("-")


def family_cell(found, metrics: Sequence[str], not_measured: Mapping[str, str]) -> Cell:
    """What the table says of a family of metrics, from its values in a frame (None: not there) and the status.

    Fails where a value is missing without a word.
    """
    words = "; ".join(dict.fromkeys(not_measured[metric] for metric in metrics if metric in not_measured))
    is_whole = all(values is not None and values.isfinite().all() for values in found)
    assert is_whole or words, f"{metrics} are missing in part, and nothing is said: {found}"
    if not words:
        return Cell(YES)
    has_some = any(values is not None and values.isfinite().any() for values in found)
    return Cell(IN_PART if has_some else NO, words)


class Matrix:
    """Cells as the tests fill them. A row whose tests did not all run, or did not come so far, is not complete."""

    def __init__(self) -> None:
        self._cells: dict[Row, dict[str, Cell]] = {}
        self._documented = compatibility.read(compatibility.DOCUMENT.read_text())

    def record(self, row: Row, column: str, cell: Cell) -> None:
        """Keep what a test has seen. Fails where the document says otherwise."""
        self._cells.setdefault(row, {})[column] = cell
        documented = self._documented.get(row.name, {}).get(column)
        assert documented == [cell.answer, cell.words], (
            f"{compatibility.DOCUMENT.name} says otherwise; write it anew: {compatibility.COMMAND}"
        )

    def keep(self, cache: pytest.Cache, rows: Sequence[Row]) -> None:
        """For scripts/compatibility.py, beside what was seen at other times."""
        for kind in {row.kind for row in self._cells}:
            key = f"{compatibility.CACHE_KEY}/{kind}"
            kept = {row["name"]: row["cells"] for row in cache.get(key, [])}
            cells = {row.name: self._row(row) or kept.get(row.name, []) for row in rows if row.kind == kind}
            cache.set(key, [{"kind": kind, "name": name, "cells": cells} for name, cells in cells.items()])

    def _row(self, row: Row) -> list[list[str]]:
        """As it stands in the document, column by column; empty where it is not complete."""
        seen = self._cells.get(row, {})
        if any(column not in seen for column in row.columns):
            return []
        cells = [seen.get(column, NOTHING) for column in COLUMNS]
        return [[cell.answer, cell.words] for cell in cells]
