"""The cost of a rule, estimated from its nodes before it reads anything.

Estimates are CPU time for one frame that is read alone, and memory of one attempt, of a model of `BLOCKS` blocks with
`HEADS` heads. Times were measured on one core of the machine of docs/benchmarks.md and rounded up: NaN anywhere is included.
"""

from __future__ import annotations

from typing import NamedTuple

BLOCKS = 48
HEADS = 32
ENTRIES = (1, BLOCKS + 1, BLOCKS * HEADS)
"""Number of values of a node, by its axes. Activations have an entry for the input of the first block."""

NUMBER_BYTES = 32
"""A float and its place in a list."""
CELL_BYTES = 88
"""The list itself, and its place."""
STORE_US = 0.003
"""To store a number with every 16th frame."""


class Work(NamedTuple):
    """The cost of a node."""

    us: float
    num_cells: int = 0
    num_numbers: int = 0
    """In all cells together, when they are full."""

    @property
    def memory_bytes(self) -> int:
        return CELL_BYTES * self.num_cells + NUMBER_BYTES * self.num_numbers


def elementwise(axes: int, passes: int, number_us: float = 0) -> Work:
    """Return the cost of arithmetic on each value, in passes of numpy; `number_us` is the cost for one number."""
    return Work(number_us or 0.3 + 0.3 * passes) if axes == 0 else Work(passes * (1.2 + 0.003 * ENTRIES[axes]))


def reduction(us_a_row: float, us_a_value: float, *, of_axes: int) -> Work:
    """Return the cost of a reduction from layers to a number, or from heads to blocks."""
    num_rows = 1 if of_axes == 1 else BLOCKS
    return Work(6 + us_a_row * num_rows + us_a_value * ENTRIES[of_axes])


def remembering(axes: int, cell_us: float, cell_numbers: int) -> Work:
    """Return the cost of a memory with a cell for each value."""
    num_cells = ENTRIES[axes]
    num_numbers = num_cells * cell_numbers
    return Work((12 if axes else 0) + cell_us * num_cells + STORE_US * num_numbers, num_cells, num_numbers)


SHOWN = Work(1, 1, 16)
"""Cost of the last samples of a compared number, which an alert shows."""
RULE_US = 5.0
"""Cost of a rule besides its nodes, while its alert is not quiet."""


def change_us(num_numbers: int, num_arrays: int, num_profiles: int, num_texts: int) -> float:
    """Return the cost of a change of an alert, which shows compared numbers and arrays, layers, and advice."""
    return 40 + 5 * num_numbers + 18 * num_arrays + 30 * num_profiles + 2 * num_texts


class Cost(NamedTuple):
    """Cost of rules."""

    frame_us: float
    memory_bytes: int
    change_us: float
    """CPU time for a frame at which all alerts change, in addition to `frame_us`."""


class Priced(NamedTuple):
    """A part of a rule, and its cost."""

    says: str
    work: Work
