"""Sums that several processes can merge, and what becomes of them.

A quantity of a batch is computed in two steps: sums over a part of the batch, and `finish` of the merged sums. A function
of one tensor is the finish of that tensor's own sums, so both forms are the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Merge = Literal["sum", "max", "min"]

NOTHING: dict[Merge, float] = {"sum": 0.0, "max": -math.inf, "min": math.inf}
"""Contribution of a part without a measurement."""


class Partial(NamedTuple):
    """The share that one part has in a quantity, and how the shares of several parts merge."""

    value: Tensor
    merge: Merge = "sum"


Partials = dict[str, Partial]
COUNT = "/n"
"""Suffix of the name under which the number of values in a sum is kept."""


def counted(name: str, values: Tensor, dim: int = -1) -> Partials:
    """Return the sum and the number of `values` along `dim`, NaN left out: a mean that parts can merge."""
    is_known = ~values.isnan()
    return {
        name: Partial(torch.where(is_known, values, 0.0).sum(dim)),
        name + COUNT: Partial(is_known.sum(dim).to(values.dtype)),
    }


def mean(sums: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the mean that `counted` began. NaN if nothing was counted."""
    return sums[name] / sums[name + COUNT]


def values_of(partials: Mapping[str, Partial]) -> dict[str, Tensor]:
    """Return the sums of the only part there is."""
    return {name: partial.value for name, partial in partials.items()}


def known(extreme: Tensor) -> Tensor:
    """Return a maximum or minimum, NaN where it is infinite because nothing was there to be compared."""
    return torch.where(extreme.isinf(), torch.nan, extreme)
