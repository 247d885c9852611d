"""What the frames of a batch have of one quantity: a column with an entry for each row.

A column of numbers is a list of floats, in which NaN is what was not measured; one of answers has True, False and None.
A column of arrays is a list of sheets: in each lie the rows whose arrays have one shape. What was not measured, or is
empty, is in none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = list[float]
Answers = list[bool | None]


class Sheet:
    """Arrays of one shape, from one row each."""

    def __init__(self, rows: Sequence[int], values: Array) -> None:
        self.rows = rows
        """Numbers of rows, rising."""
        self.values = values
        """(rows, layers) or (rows, blocks, heads); none of them 0"""

    @cached_property
    def lowest(self) -> Numbers:
        """Of each row of layers; NaN where any of them is NaN."""
        found: Numbers = np.minimum.reduce(self.values, axis=-1).tolist()
        return found

    @cached_property
    def highest(self) -> Numbers:
        """Of each row of layers; NaN where any of them is NaN."""
        found: Numbers = np.maximum.reduce(self.values, axis=-1).tolist()
        return found

    @cached_property
    def is_whole(self) -> bool:
        """True if no layer is NaN."""
        return all(x == x for x in self.lowest)

    def known_extremes(self, is_lowest: bool) -> Numbers:
        """Of the layers that are not NaN, for each row; NaN where all are."""
        if self.is_whole:
            return self.lowest if is_lowest else self.highest
        return self._known_lowest if is_lowest else self._known_highest

    @cached_property
    def _known_lowest(self) -> Numbers:
        found: Numbers = np.fmin.reduce(self.values, axis=-1).tolist()
        return found

    @cached_property
    def _known_highest(self) -> Numbers:
        found: Numbers = np.fmax.reduce(self.values, axis=-1).tolist()
        return found

    @cached_property
    def notes(self) -> dict[Any, Any]:
        """What several nodes make of this sheet, and one has worked out."""
        return {}

    def at(self, rows: Sequence[int]) -> Array:
        """The arrays of some of the rows."""
        if len(rows) == len(self.rows):
            return self.values
        places = {row: place for place, row in enumerate(self.rows)}
        return self.values[[places[row] for row in rows]]


Sheets = list[Sheet]
Column = Numbers | Answers | Sheets


def read_sheets(measured: Sequence[Sequence[NDArray[Any] | None]]) -> list[Sheets]:
    """The columns of several measures, from what the frames have of each; None is what was not measured.

    What has one shape in the same rows is copied, and its lowest and highest found, at once.
    """
    columns: list[Sheets] = [[] for _ in measured]
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for place, arrays in enumerate(measured):
        for shape, rows in _by_shape(arrays):
            alike.setdefault((shape, rows), []).append(place)
    for (shape, rows), places in alike.items():
        arrays = [array for place in places for array in _those(measured[place], rows)]
        values = np.concatenate(arrays).reshape(len(places), len(rows), *shape).astype(np.float64)
        sheets = [Sheet(rows, own) for own in values]
        if len(shape) == 1:
            ends = (end.reduce(values, axis=-1).tolist() for end in (np.minimum, np.maximum))
            for sheet, lowest, highest in zip(sheets, *ends, strict=True):
                sheet.lowest, sheet.highest = lowest, highest
        for place, sheet in zip(places, sheets, strict=True):
            columns[place].append(sheet)
    return columns


def _by_shape(arrays: Sequence[NDArray[Any] | None]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each shape that is not empty, and the rows that have it."""
    shapes = [None if array is None else array.shape for array in arrays]
    if shapes.count(shapes[0]) == len(shapes):
        found = {shapes[0]: [*range(len(shapes))]}
    else:
        found = {}
        for row, shape in enumerate(shapes):
            found.setdefault(shape, []).append(row)
    return [(shape, tuple(rows)) for shape, rows in found.items() if shape is not None and 0 not in shape]


def _those(arrays: Sequence[NDArray[Any] | None], rows: Sequence[int]) -> Iterator[NDArray[Any]]:
    for row in rows:
        array = arrays[row]
        assert array is not None
        yield array


def of_each(function: Callable[[Array], Array], sheets: Sheets) -> Sheets:
    """Elementwise."""
    return [Sheet(sheet.rows, function(sheet.values)) for sheet in sheets]


def beside(function: Callable[[Array, Array], Array], sheets: Sheets, numbers: Numbers) -> Sheets:
    """Each row of the sheets with its number."""
    found = []
    for sheet in sheets:
        own = np.array([numbers[row] for row in sheet.rows]).reshape(-1, *[1] * (sheet.values.ndim - 1))
        found.append(Sheet(sheet.rows, function(sheet.values, own)))
    return found


def aligned(function: Callable[[Array, Array], Array], left: Sheets, right: Sheets) -> Sheets:
    """Elementwise. Where the two sides have other shapes, or one was not measured, there is nothing."""
    found = []
    for one in left:
        for other in right:
            if one.values.shape[1:] == other.values.shape[1:]:
                rows = one.rows if one.rows == other.rows else _common(one.rows, other.rows)
                if rows:
                    found.append(Sheet(rows, function(one.at(rows), other.at(rows))))
    return found


def _common(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    known = {*right}
    return tuple(row for row in left if row in known)


def spread(sheets: Sheets, of_each: Sequence[Sequence[Any]], nothing: Any, num_rows: int) -> list[Any]:
    """A column of what each sheet gave for its rows, and of `nothing` in all others."""
    if len(sheets) == 1 and len(sheets[0].rows) == num_rows:
        return [*of_each[0]]
    column = [nothing] * num_rows
    for sheet, entries in zip(sheets, of_each, strict=True):
        for row, entry in zip(sheet.rows, entries, strict=True):
            column[row] = entry
    return column


class Row:
    """What all columns have in one row: floats, answers, and arrays, which are empty where there is nothing."""

    def __init__(self, columns: Sequence[Column], row: int) -> None:
        self._columns = columns
        self._row = row

    def __getitem__(self, node: int) -> Any:
        column = self._columns[node]
        if column and not isinstance(column[0], Sheet):
            return column[self._row]
        for sheet in column:
            assert isinstance(sheet, Sheet)
            if self._row in sheet.rows:
                return sheet.values[sheet.rows.index(self._row)]
        return np.empty(0)
