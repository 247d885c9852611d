"""The processes that train one model together: those that torchrun started, or this one alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tsemon.errors import InvalidArgument, reason

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Processes:
    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes, in each of them."""
        if self.group is None:
            return values
        values = values.clone()
        dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: T) -> list[T]:
        """What each of them has, in the order of ranks."""
        if self.group is None:
            return [value]
        gathered: list[T | None] = [None] * self.world
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered  # type: ignore[return-value]  # all of them are there now

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process does it before the others do: it leaves files that they find."""
        if not self.is_first:
            self.gather(None)
        try:
            yield
        finally:
            if self.is_first:
                self.gather(None)


@contextmanager
def processes(device: str | None = None) -> Iterator[Processes]:
    """Joins the group that torchrun announces, for as long as the context lasts. Without a device: a GPU if there is one."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        yield Processes(device=_usable(kind))
        return
    place = _usable(f"cuda:{os.environ['LOCAL_RANK']}" if kind == "cuda" else kind)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Processes(rank=dist.get_rank(), world=dist.get_world_size(), device=place, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _usable(name: str) -> torch.device:
    """The device, if a number can be had from it. Raises InvalidArgument."""
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each kind of device is missing in its own way
        num_gpus = torch.cuda.device_count()
        there = f"cpu and {num_gpus} of cuda" if num_gpus else "cpu alone"
        raise InvalidArgument(
            f"a device that computes here was expected ({there}), got {name!r}: {reason(error)}; choose another --device"
        ) from error
    return torch.device(name)
