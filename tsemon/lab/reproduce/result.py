"""What an experiment has to show: what the paper says, what we see, and the figures for both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from tsemon.errors import InvalidArgument

Verdict = Literal["yes", "in part", "no", "not testable at this size", "ours, no claim of the paper"]
OURS: Verdict = "ours, no claim of the paper"
NOT_TESTABLE: Verdict = "not testable at this size"
Numbers = dict[str, Any]
"""Numbers and texts that a trial has found, and lists and dicts of them."""
Trial = Callable[[], Numbers]
"""A part of an experiment that depends on no other part. Processes pass it to each other."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What can be repeated, as the index names it."""

    name: str
    """As on the command line."""
    title: str
    source: str
    """Paper and figure."""
    num_seeds: int = 1
    """How often `run` is repeated with other seeds, unless it is quick."""
    needs_gpu: bool = False
    chosen_by: str = ""
    """Environment variable, and what it chooses."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence of the paper, held against what was measured."""

    paper: str
    """The paper's own words or figures; with the verdict OURS, our question."""
    seen: str
    """Figures of the experiment as the paper printed it."""
    agrees: Verdict
    reading: str = ""
    """Figures of the experiment as we read it, if that differs."""
    is_stable: bool = True
    """Whether quick runs give the verdict of the full one with each of three seeds."""


def verdict(*conditions: bool) -> Verdict:
    """Yes where all hold, no where none does. Raises InvalidArgument where there is none: nobody has tested the claim."""
    if not conditions:
        raise InvalidArgument("a verdict needs one condition or more, got none; leave out a claim that nothing tests")
    if all(conditions):
        return "yes"
    return "in part" if any(conditions) else "no"


@dataclass(frozen=True)
class Spread:
    """A quantity over seeds."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; 0 for one seed."""
        if len(self.values) < 2:
            return 0.0
        mean = self.mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / (len(self.values) - 1))

    @property
    def geometric_mean(self) -> float:
        """The values must not be negative."""
        with np.errstate(divide="ignore"):
            return float(np.exp(np.mean(np.log(self.values))))

    @property
    def order(self) -> float:
        """The mean to sort by: infinite if it is not finite."""
        return self.mean if math.isfinite(self.mean) else math.inf

    def is_below(self, other: Spread | float) -> bool:
        """Whether the mean is lower by more than both standard deviations together."""
        other = other if isinstance(other, Spread) else Spread([other])
        return self.mean + self.deviation < other.mean - other.deviation

    def is_above(self, other: Spread | float) -> bool:
        """Whether the mean is higher by more than both standard deviations together."""
        return (other if isinstance(other, Spread) else Spread([other])).is_below(self)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.deviation:.3f}" if len(self.values) > 1 else f"{self.mean:.3f}"


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[float | int | str]]

    @classmethod
    def numbered(cls, title: str, counted: str, columns: Mapping[str, NDArray[np.float64]]) -> Table:
        """Columns of numbers of one length; the rows are `counted` from 1."""
        rows = np.stack(list(columns.values()), axis=1).tolist()
        return cls(title=title, columns=(counted, *columns), rows=[(n, *row) for n, row in enumerate(rows, start=1)])


@dataclass(frozen=True, kw_only=True)
class Plot:
    figure: Figure
    caption: str


@dataclass(frozen=True, kw_only=True)
class Result:
    settings: Mapping[str, Any]
    """Sizes, seeds, and whatever else another would need to repeat it."""
    claims: Sequence[Claim]
    plots: Mapping[str, Plot]
    """By the name of the file, without its ending."""
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default=())
    """Readings that were chosen, what was made smaller, and why figures differ."""
