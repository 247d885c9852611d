"""The table of set-ups: its rows, its columns, and what goes into a cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from scripts import compatibility
from scripts.compatibility import COLUMNS

BIT_EQUAL, *FAMILIES, GRAPHS, CLEAN, COPIES = COLUMNS
HIDDEN_STATES, ATTENTION, FEED_FORWARD, OUTPUTS, PARAMETERS, GRADIENTS, UPDATES, SATURATION = FAMILIES
EAGER = tuple(column for column in COLUMNS if column != GRAPHS)

YES, IN_PART, NO = "yes", "in part", "no"


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One line of the table."""

    kind: str
    name: str
    columns: Sequence[str] = EAGER
    """What is tried on it; the other cells hold a dash."""


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
    """Cells as the tests fill them. A row whose tests did not all run, or pass, is not complete."""

    def __init__(self) -> None:
        self._cells: dict[Row, dict[str, Cell]] = {}

    def record(self, row: Row, column: str, cell: Cell) -> None:
        self._cells.setdefault(row, {})[column] = cell

    def cells(self, row: Row) -> list[list[str]]:
        """The row as it stands in the document, column by column; empty where it is not complete."""
        seen = self._cells.get(row, {})
        if any(column not in seen for column in row.columns):
            return []
        cells = [seen[column] if column in row.columns else NOTHING for column in COLUMNS]
        return [[cell.answer, cell.words] for cell in cells]

    def assert_documented(self, row: Row) -> None:
        """The document says of a set-up what its tests have seen."""
        if not (cells := self.cells(row)):
            pytest.skip("its tests did not all run, or pass")
        committed = compatibility.read(compatibility.DOCUMENT.read_text())[row.name]
        assert cells == committed, (
            f"{compatibility.DOCUMENT.name} says otherwise; write it anew: {compatibility.COMMAND}"
        )
