"""Batches without end, whose position can be kept and gone on from.

Every order is drawn from a generator of its own: a seed gives the same batches whatever else the process draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""


class Batches(Iterator[Batch], ABC):
    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position: which batch comes next, and after it."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position of batches that were made with the same arguments."""


class Shard(Batches):
    """Every `world`-th row of each batch, from row `rank` on. The shards of all ranks together are the batch."""

    def __init__(self, batches: Batches, rank: int, world: int) -> None:
        self._batches = batches
        self._rows = slice(rank, None, world)

    def __next__(self) -> Batch:
        inputs, targets = next(self._batches)
        return inputs[self._rows], targets[self._rows]

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.load_state_dict(state)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
