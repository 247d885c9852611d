"""What an experiment has to show: what the paper says, what we see, and the figures for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from tsemon.errors import InvalidArgument

Verdict = Literal["yes", "in part", "no"]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What can be repeated, as the index names it."""

    name: str
    """As on the command line."""
    title: str
    source: str
    """Paper and figure."""
    needs_gpu: bool = False
    chosen_by: str = ""
    """Environment variable, and what it chooses."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence of the paper, held against what was measured."""

    paper: str
    seen: str
    """With the figures that say so."""
    agrees: Verdict


def verdict(*conditions: bool) -> Verdict:
    """Yes where all hold, no where none does. Raises InvalidArgument where there is none: nobody has tested the claim."""
    if not conditions:
        raise InvalidArgument("a verdict needs one condition or more, got none; leave out a claim that nothing tests")
    if all(conditions):
        return "yes"
    return "in part" if any(conditions) else "no"


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
