"""Several processes that train one model together: their sums become those of the whole batch and of the whole model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tsemon.probes.part import Merge, Partial

T = TypeVar("T")

NOTHING: dict[Merge, float] = {"sum": 0.0, "max": -math.inf, "min": math.inf}
"""What a process adds that has not measured something."""


class _Slot(NamedTuple):
    name: str
    merge: Merge
    shape: tuple[int, ...]


class Ranks:
    """All processes of a group, each with its own share of the samples or of the parameters.

    Every process calls `merge` at the same steps, whatever went wrong in it: one flat collective a call, of the same size
    everywhere. Which sums it holds is agreed once, in the first call.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._layout: list[_Slot] | None = None
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def exchange(self, own: T) -> list[T]:
        """What every process passes to this call, in the order of ranks. For the start of a run: it waits for all."""
        of_all: list[Any] = [None] * self.size
        dist.all_gather_object(of_all, own, group=self._group)
        return of_all

    def merge(self, partials: Mapping[str, Partial], device: torch.device) -> dict[str, Tensor]:
        """The sums of all processes, by name. Names that not all have are left out."""
        if self._layout is None:
            self._layout = self._agree(partials)
        if not self._layout:
            return {}
        own = torch.cat([_flat(slot, partials.get(slot.name), device) for slot in self._layout])
        gathered = own.new_empty(self.size * own.numel())
        dist.all_gather_into_tensor(gathered, own, group=self._group)
        of_all_RN = gathered.view(self.size, -1)
        merged, offset = {}, 0
        for slot in self._layout:
            size = math.prod(slot.shape)
            merged[slot.name] = _merged(of_all_RN[:, offset : offset + size], slot.merge).view(slot.shape)
            offset += size
        return merged

    def _agree(self, partials: Mapping[str, Partial]) -> list[_Slot]:
        mine = [_Slot(name, p.merge, tuple(p.value.shape)) for name, p in partials.items()]
        common = set.intersection(*(set(slots) for slots in self.exchange(mine)))
        return sorted(common)


def _flat(slot: _Slot, partial: Partial | None, device: torch.device) -> Tensor:
    if partial is None or tuple(partial.value.shape) != slot.shape:
        return torch.full((math.prod(slot.shape),), NOTHING[slot.merge], device=device, dtype=torch.float64)
    return partial.value.detach().to(device, torch.float64, non_blocking=True).reshape(-1)


def _merged(of_all_RN: Tensor, merge: Merge) -> Tensor:
    if merge == "sum":
        return of_all_RN.sum(dim=0)
    return of_all_RN.amax(dim=0) if merge == "max" else of_all_RN.amin(dim=0)
