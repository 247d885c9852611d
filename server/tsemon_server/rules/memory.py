"""What is remembered of one number from sample to sample. A cell is a short list of floats, so that it can be stored.

A memory's `push` takes the cell, the number of the new sample and its step, and gives the number that a rule sees. NaN is
what was not measured: it is not remembered.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

Cell = list[float]

MAX_SAMPLES = 1000
"""The longest memory: what is remembered is stored with every body of frames."""


class Memory(ABC):
    """One of the ways to remember."""

    @abstractmethod
    def push(self, cell: Cell, value: float, step: int) -> float:
        """Remember `value`, and give what comes of it and of those before."""


@dataclass(frozen=True)
class Window(Memory):
    """A statistic of the last `num_samples`; undefined before there are so many."""

    take: Callable[[Sequence[float], Sequence[float]], float]
    """Of values and their steps, oldest first."""
    num_samples: int

    def push(self, cell: Cell, value: float, step: int) -> float:
        if value != value:
            return math.nan
        cell += (value, float(step))
        del cell[: -2 * self.num_samples]
        if len(cell) < 2 * self.num_samples:
            return math.nan
        return self.take(cell[::2], cell[1::2])


@dataclass(frozen=True)
class Start(Memory):
    """A statistic of the first `num_samples` of the attempt; undefined before there are so many."""

    take: Callable[[Sequence[float], Sequence[float]], float]
    num_samples: int

    def push(self, cell: Cell, value: float, step: int) -> float:
        if len(cell) == 1:  # what came of it; a pair for each sample before
            return cell[0]
        if math.isfinite(value):  # nothing can be held against a start without bound
            cell += (value, float(step))
        if len(cell) < 2 * self.num_samples:
            return math.nan
        cell[:] = [self.take(cell[::2], cell[1::2])]
        return cell[0]


@dataclass(frozen=True)
class Best(Memory):
    """The lowest, or the highest, so far."""

    is_lowest: bool

    def push(self, cell: Cell, value: float, step: int) -> float:
        if math.isfinite(value) and (not cell or (value < cell[0] if self.is_lowest else value > cell[0])):
            cell[:] = [value]
        return cell[0] if cell else math.nan


@dataclass(frozen=True)
class ZScore(Memory):
    """How many standard deviations off the `num_samples` before; median and MAD, so that one odd sample moves neither.

    z = (x - median) / (1.4826 MAD), where 1.4826 makes MAD the standard deviation of a normal distribution. What has not
    moved at all has a spread of a thousandth of its size: or any change would be infinitely far off.
    """

    num_samples: int

    def push(self, cell: Cell, value: float, step: int) -> float:
        if value != value:
            return math.nan
        z = self._of(cell, value) if len(cell) == self.num_samples else math.nan
        if math.isfinite(value):
            cell.append(value)
            del cell[: -self.num_samples]
        return z

    def _of(self, cell: Cell, value: float) -> float:
        middle = median(cell)
        spread = 1.4826 * median([abs(x - middle) for x in cell])
        return (value - middle) / max(spread, 1e-3 * abs(middle), 1e-30)


@dataclass(frozen=True)
class Previous(Memory):
    """What it was so many samples ago."""

    num_samples: int

    def push(self, cell: Cell, value: float, step: int) -> float:
        if value != value:
            return math.nan
        cell.append(value)
        del cell[: -self.num_samples - 1]
        return cell[0] if len(cell) > self.num_samples else math.nan


@dataclass(frozen=True)
class StepsSince(Memory):
    """Steps since it was last better than its best by a share `by` of that."""

    is_lowest: bool
    by_ratio: float

    def push(self, cell: Cell, value: float, step: int) -> float:
        if value == value and (not cell or self._is_better(value, cell[0])):
            cell[:] = [value, float(step)]
        return step - cell[1] if cell else math.nan

    def _is_better(self, value: float, best: float) -> bool:
        margin = self.by_ratio * abs(best)
        return value < best - margin if self.is_lowest else value > best + margin


@dataclass(frozen=True)
class StepsIn(Memory):
    """Steps for which a condition, 1 or 0, has held without a break; 0 at the first sample at which it does."""

    def push(self, cell: Cell, value: float, step: int) -> float:
        if value == 0:
            cell.clear()
        elif value == 1 and not cell:
            cell.append(float(step))
        return step - cell[0] if cell else (math.nan if value != value else 0.0)


@dataclass(frozen=True)
class HowOften(Memory):
    """In how many of the last `num_samples` a condition, 1 or 0, held. What never came counts as not."""

    num_samples: int

    def push(self, cell: Cell, value: float, step: int) -> float:
        if value == value:
            cell.append(value)
            del cell[: -self.num_samples]
        return sum(cell) if cell else math.nan


@dataclass(frozen=True)
class Recent(Memory):
    """The last `num_samples` with their steps, to be shown: a trend that fits into a message."""

    num_samples: int

    def push(self, cell: Cell, value: float, step: int) -> float:
        cell += (float(step), value)
        del cell[: -2 * self.num_samples]
        return value


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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


OVER_TIME: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "mean": lambda values, _: mean(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "median": lambda values, _: median(values),
    "std": lambda values, _: deviation(values),
    "first": lambda values, _: values[0],
    "last": lambda values, _: values[-1],
    "slope": slope,
    "change": lambda values, _: values[-1] - values[0],
    "ratio": lambda values, _: values[-1] / values[0] if values[0] else math.nan,
}
