"""Memories of one number from sample to sample. A cell is a short list of floats, so that it can be stored.

A memory's `read` takes the cell, some samples and their steps. It returns the number that a rule sees at each of them, and
the new cell. Reading samples together or one by one gives the same. Missing values are NaN and are not remembered.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tsemon_server.rules.columns import Numbers

Cell = list[float]
Seen = tuple[Numbers, Cell]
"""A number for each sample, and the new cell."""

MAX_SAMPLES = 1000
"""The longest memory: all cells are stored at every checkpoint."""


class Statistic(NamedTuple):
    """A number of the last or the first samples."""

    of: Callable[[Sequence[float], Sequence[float]], float]
    """Function of values and their steps, oldest first."""
    us: float
    """Estimated CPU time for each value."""


class Memory(ABC):
    """One of the ways to remember."""

    @property
    @abstractmethod
    def num_kept(self) -> int:
        """Maximum number of numbers in a cell."""

    @property
    @abstractmethod
    def us(self) -> float:
        """Estimated CPU time of a sample, once the cell is full."""

    @abstractmethod
    def read(self, cell: Cell, values: Sequence[Any], steps: Sequence[float]) -> Seen:
        """The result for each value, and the new cell. The given cell is not changed."""

    def num_missing(self, cell: Cell) -> int | None:
        """Values that it needs beyond those in the cell before it gives a result; None if the cell alone may give one."""
        return None if cell else 0


@dataclass(frozen=True)
class Window(Memory):
    """A statistic of the last `num_samples`; undefined until there are that many."""

    take: Statistic
    num_samples: int

    @property
    def num_kept(self) -> int:
        return 2 * self.num_samples

    @property
    def us(self) -> float:
        return 4 + (0.01 + self.take.us) * self.num_samples

    def num_missing(self, cell: Cell) -> int:
        return self.num_samples - len(cell) // 2

    def read(self, cell: Cell, values: Sequence[float], steps: Sequence[float]) -> Seen:
        cell, seen, full = cell[:], [], 2 * self.num_samples
        for x, step in zip(values, steps, strict=True):
            if x == x:
                cell += (x, step)
                del cell[:-full]
            is_there = x == x and len(cell) == full
            seen.append(self.take.of(cell[::2], cell[1::2]) if is_there else math.nan)
        return seen, cell


@dataclass(frozen=True)
class Start(Memory):
    """A statistic of the first `num_samples` of the attempt; undefined until there are that many."""

    take: Statistic
    num_samples: int

    @property
    def num_kept(self) -> int:
        return 2 * self.num_samples

    @property
    def us(self) -> float:
        return 1 + 0.01 * self.num_samples

    def num_missing(self, cell: Cell) -> int | None:
        return None if len(cell) == 1 else self.num_samples - len(cell) // 2

    def read(self, cell: Cell, values: Sequence[float], steps: Sequence[float]) -> Seen:
        if len(cell) == 1:  # what came of it; a pair for each sample before
            return cell * len(values), cell
        cell, seen = cell[:], []
        for x, step in zip(values, steps, strict=True):
            if len(cell) != 1:
                if math.isfinite(x):  # nothing can be held against a start without bound
                    cell += (x, step)
                if len(cell) >= 2 * self.num_samples:
                    cell = [self.take.of(cell[::2], cell[1::2])]
            seen.append(cell[0] if len(cell) == 1 else math.nan)
        return seen, cell


@dataclass(frozen=True)
class Best(Memory):
    """The lowest, or the highest, so far."""

    is_lowest: bool

    @property
    def num_kept(self) -> int:
        return 1

    @property
    def us(self) -> float:
        return 1.0

    def read(self, cell: Cell, values: Sequence[float], steps: Sequence[float]) -> Seen:
        best, seen = cell[0] if cell else math.nan, []
        for x in values:
            if math.isfinite(x) and (best != best or (x < best if self.is_lowest else x > best)):
                best = x
            seen.append(best)
        return seen, [best] if best == best else []


@dataclass(frozen=True)
class ZScore(Memory):
    """How many standard deviations off the `num_samples` before; median and MAD, so that one odd sample moves neither.

    z = (x - median) / (1.4826 MAD), where 1.4826 makes MAD the standard deviation of a normal distribution. What has not
    moved at all has a spread of a thousandth of its size: or any change would be infinitely far off.
    """

    num_samples: int

    @property
    def num_kept(self) -> int:
        return self.num_samples

    @property
    def us(self) -> float:
        return 2 + 0.14 * self.num_samples

    def num_missing(self, cell: Cell) -> int:
        return 0 if len(cell) == self.num_samples else self.num_samples + 1 - len(cell)

    def read(self, cell: Cell, values: Sequence[float], steps: Sequence[float]) -> Seen:
        cell, seen = cell[:], []
        for x in values:
            seen.append(self._of(cell, x) if x == x and len(cell) == self.num_samples else math.nan)
            if math.isfinite(x):
                cell.append(x)
                del cell[: -self.num_samples]
        return seen, cell

    def _of(self, cell: Cell, value: float) -> float:
        middle = median(cell)
        spread = 1.4826 * median([abs(x - middle) for x in cell])
        return (value - middle) / max(spread, 1e-3 * abs(middle), 1e-30)


@dataclass(frozen=True)
class Previous(Memory):
    """The value `num_samples` samples ago."""

    num_samples: int

    @property
    def num_kept(self) -> int:
        return self.num_samples + 1

    @property
    def us(self) -> float:
        return 1 + 0.004 * self.num_samples

    def num_missing(self, cell: Cell) -> int:
        return self.num_samples + 1 - len(cell)

    def read(self, cell: Cell, values: Sequence[float], steps: Sequence[float]) -> Seen:
        cell, seen = cell[:], []
        for x in values:
            if x == x:
                cell.append(x)
                del cell[: -self.num_samples - 1]
            seen.append(cell[0] if x == x and len(cell) > self.num_samples else math.nan)
        return seen, cell


@dataclass(frozen=True)
class StepsAgo(Memory):
    """The newest value that is at least `num_steps` steps old."""

    num_steps: int

    @property
    def num_kept(self) -> int:
        return 2 * (self.num_steps + 1)

    @property
    def us(self) -> float:
        return 1.5 + 0.01 * self.num_steps

    def num_missing(self, cell: Cell) -> int:
        return 0 if cell else 2

    def read(self, cell: Cell, values: Sequence[float], steps: Sequence[float]) -> Seen:
        cell, seen = cell[:], []
        for x, step in zip(values, steps, strict=True):
            if x == x:
                cell += (x, step)
                while len(cell) > 2 and step - cell[3] >= self.num_steps:
                    del cell[:2]
                del cell[: -self.num_kept]
            seen.append(cell[0] if x == x and step - cell[1] >= self.num_steps else math.nan)
        return seen, cell


@dataclass(frozen=True)
class StepsSince(Memory):
    """Steps since it was last better than its best by a share `by` of that."""

    is_lowest: bool
    by_ratio: float

    @property
    def num_kept(self) -> int:
        return 2

    @property
    def us(self) -> float:
        return 1.5

    def read(self, cell: Cell, values: Sequence[float], steps: Sequence[float]) -> Seen:
        seen = []
        for x, step in zip(values, steps, strict=True):
            if x == x and (not cell or self._is_better(x, cell[0])):
                cell = [x, step]
            seen.append(step - cell[1] if cell else math.nan)
        return seen, cell

    def _is_better(self, value: float, best: float) -> bool:
        margin = self.by_ratio * abs(best)
        return value < best - margin if self.is_lowest else value > best + margin


@dataclass(frozen=True)
class StepsIn(Memory):
    """Steps for which a condition has held without a break; 0 at the first sample at which it does."""

    @property
    def num_kept(self) -> int:
        return 1

    @property
    def us(self) -> float:
        return 1.5

    def num_missing(self, cell: Cell) -> None:
        return None  # a condition that does not hold may be known before all of its parts are

    def read(self, cell: Cell, values: Sequence[bool | None], steps: Sequence[float]) -> Seen:
        seen = []
        for holds, step in zip(values, steps, strict=True):
            if holds is False:
                cell = []
            elif holds is True and not cell:
                cell = [step]
            seen.append(step - cell[0] if cell else (math.nan if holds is None else 0.0))
        return seen, cell


@dataclass(frozen=True)
class HowOften(Memory):
    """In how many of the last `num_samples` a condition held. Missing samples count as not held."""

    num_samples: int

    @property
    def num_kept(self) -> int:
        return self.num_samples

    @property
    def us(self) -> float:
        return 1.5 + 0.01 * self.num_samples

    def num_missing(self, cell: Cell) -> None:
        return None  # a condition that does not hold may be known before all of its parts are

    def read(self, cell: Cell, values: Sequence[bool | None], steps: Sequence[float]) -> Seen:
        cell, seen = cell[:], []
        for holds in values:
            if holds is not None:
                cell.append(float(holds))
                del cell[: -self.num_samples]
            seen.append(sum(cell) if cell else math.nan)
        return seen, cell


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def median(values: Sequence[float]) -> float:
    """The same as `statistics.median`, in half the time."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def deviation(values: Sequence[float]) -> float:
    """The standard deviation, of the values as they are."""
    middle = mean(values)
    return math.sqrt(mean([(x - middle) * (x - middle) for x in values])) if math.isfinite(middle) else math.nan


def slope(values: Sequence[float], steps: Sequence[float]) -> float:
    """Of the least-squares line, per step."""
    middle, at = mean(values), mean(steps)
    spread = sum((step - at) * (step - at) for step in steps)
    return (
        sum((x - middle) * (step - at) for x, step in zip(values, steps, strict=True)) / spread if spread else math.nan
    )


SORTED_US = 0.05

OVER_TIME: dict[str, Statistic] = {
    "mean": Statistic(lambda values, _: mean(values), 0.01),
    "min": Statistic(lambda values, _: min(values), 0.02),
    "max": Statistic(lambda values, _: max(values), 0.02),
    "median": Statistic(lambda values, _: median(values), SORTED_US),
    "std": Statistic(lambda values, _: deviation(values), 0.06),
    "first": Statistic(lambda values, _: values[0], 0),
    "last": Statistic(lambda values, _: values[-1], 0),
    "slope": Statistic(slope, 0.13),
    "change": Statistic(lambda values, _: values[-1] - values[0], 0),
    "ratio": Statistic(lambda values, _: values[-1] / values[0] if values[0] else math.nan, 0),
}
