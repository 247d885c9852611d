"""What several writers measured at one step, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[np.floating[Any]]]


def filled(first: Arrays, other: Arrays) -> dict[str, NDArray[np.floating[Any]]]:
    """The one, and where it is NaN the other: stages of a pipeline send NaN for the blocks of the others."""
    filled = {**other, **first}
    for name in first.keys() & other.keys():
        mine, theirs = first[name], other[name]
        if mine.shape == theirs.shape:
            filled[name] = np.where(np.isnan(mine), theirs, mine)
    return filled
