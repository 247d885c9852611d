"""Columns: one quantity of all frames of a batch, with an entry for each row.

A column of numbers is a list of floats, with NaN for a missing value. A column of answers has True, False and None. A column
of arrays is a list of sheets, each with the rows whose arrays have the same shape. Missing and empty arrays are in no sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = list[float]
Answers = list[bool | None]


class Sheet:
    """Arrays of one shape, from one row each."""

    __slots__ = "_ends", "notes", "rows", "values"

    def __init__(self, rows: Sequence[int], values: Array, ends: tuple[Numbers, Numbers] | None = None) -> None:
        self.rows = rows
        """Numbers of rows, rising."""
        self.values = values
        """(rows, layers) or (rows, blocks, heads); none of them 0"""
        self.notes: dict[Any, Any] = {}
        """Results that several nodes share."""
        self._ends = ends

    @property
    def ends(self) -> tuple[Numbers, Numbers]:
        """The lowest and the highest of each row of layers; NaN where any of them is NaN."""
        if self._ends is None:
            self._ends = _reduced(np.minimum, self.values), _reduced(np.maximum, self.values)
        return self._ends

    @property
    def is_whole(self) -> bool:
        """True if no layer is NaN."""
        if "is_whole" not in self.notes:
            self.notes["is_whole"] = all(x == x for x in self.ends[0])
        is_whole: bool = self.notes["is_whole"]
        return is_whole

    @property
    def is_finite(self) -> bool:
        """True if no layer is infinite or NaN."""
        lowest, highest = self.ends
        return math.inf not in highest and -math.inf not in lowest and self.is_whole

    @property
    def known_ends(self) -> tuple[Numbers, Numbers]:
        """The same of the layers that are not NaN; NaN where all are."""
        if self.is_whole:
            return self.ends
        if "known_ends" not in self.notes:
            self.notes["known_ends"] = _reduced(np.fmin, self.values), _reduced(np.fmax, self.values)
        ends: tuple[Numbers, Numbers] = self.notes["known_ends"]
        return ends

    def at(self, rows: Sequence[int]) -> Array:
        """The arrays of some of the rows."""
        if len(rows) == len(self.rows):
            return self.values
        places = {row: place for place, row in enumerate(self.rows)}
        return self.values[[places[row] for row in rows]]


Sheets = list[Sheet]
Column = Numbers | Answers | Sheets


def _reduced(function: np.ufunc, values: Array) -> Any:
    return function.reduce(values, axis=-1).tolist()


Shape = tuple[int, ...]


def read_sheets(measured: Sequence[Sequence[NDArray[Any] | None]]) -> list[Sheets]:
    """The columns of several measures, from the arrays of the frames; None is a missing array.

    Measures with the same shapes in the same rows share one copy, and one search for the lowest and highest values.
    """
    columns: list[Sheets] = [[] for _ in measured]
    alike: dict[tuple[Shape | None, ...], list[int]] = {}
    for place, arrays in enumerate(measured):
        alike.setdefault(tuple([None if array is None else array.shape for array in arrays]), []).append(place)
    for shapes, places in alike.items():
        for shape in {*shapes} - {None}:
            assert shape is not None
            if 0 not in shape:
                rows = tuple([row for row, its_shape in enumerate(shapes) if its_shape == shape])
                _read_alike(measured, places, rows, shape, columns)
    return columns


def _read_alike(
    measured: Sequence[Sequence[Any]], places: Sequence[int], rows: Sequence[int], shape: Shape, columns: list[Sheets]
) -> None:
    """Add the sheets with these rows, of the measures in these places."""
    arrays = [measured[place][row] for place in places for row in rows]
    values = np.concatenate(arrays, dtype=np.float64).reshape(len(places), len(rows), *shape)
    if len(shape) > 1:
        for place, own in zip(places, values, strict=True):
            columns[place].append(Sheet(rows, own))
        return
    ends = zip(_reduced(np.minimum, values), _reduced(np.maximum, values), strict=True)
    for place, own, (lowest, highest) in zip(places, values, ends, strict=True):
        columns[place].append(Sheet(rows, own, (lowest, highest)))


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
    """Elementwise. Rows in which the shapes differ, or one side is missing, are left out."""
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
