"""Several processes that train one model together: their sums become those of the whole batch and of the whole model.

Axes: R ranks, N numbers.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tsemon.errors import InvalidArgument, RanksDisagree
from tsemon.measures.sums import NOTHING, Merge, Partial

T = TypeVar("T")

MAX_SLOTS = 4096
"""More names than that are not merged: a loop that invents a name a step would have them agreed on at each sample."""


class Slot(NamedTuple):
    """The place of one quantity in the collective."""

    name: str
    merge: Merge
    shape: tuple[int, ...]


class Asked(NamedTuple):
    """The largest numbers of all processes, on their way."""

    work: dist.Work
    largest: Tensor


class Ranks:
    """All processes of a group, each with its own share of the samples, of the parameters or of the depth.

    Every process calls `merge` at the same steps, whatever went wrong in it: one flat collective a call, of the same size
    everywhere. Which sums it holds is agreed in the first call, and in the next after `renew`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise InvalidArgument(
                f"process_group is a group of torch.distributed with this process in it, got {group!r}"
            )
        self._group = group
        self._layout: list[Slot] = []
        self._is_agreed = False
        self.is_broken = False
        """Whether a collective has failed here, so that these processes agree on nothing any more."""
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.stage_size = self.size
        """How many processes hold the same blocks as this one, itself among them."""
        self.waited_s = 0.0
        """Seconds spent in collectives: in the process that comes last, what one costs, in the others the wait for it."""

    def exchange(self, own: T) -> list[T]:
        """What every process passes to this call, in the order of ranks. For the start of a run: it waits for all."""
        of_all: list[Any] = [None] * self.size
        dist.all_gather_object(of_all, own, group=self._group)
        return of_all

    def together(self, prepare: Callable[[], T]) -> T:
        """What `prepare` returns here, once it has returned in every process. Raises in all where it raises in one."""
        result, error = None, None
        try:
            result = prepare()
        except Exception as caught:
            error = caught
        texts = self.exchange(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise RanksDisagree(f"rank {rank} of process_group failed, and so all of them do: {text}")
        return result  # type: ignore[return-value]

    def renew(self) -> None:
        """Agree anew in the next `merge` on what is merged. All processes call this at the same sample."""
        self._is_agreed = False

    def num_new(self, partials: Mapping[str, Partial]) -> int:
        """How many of these quantities have no place in the collective yet."""
        if not self._is_agreed or len(self._layout) >= MAX_SLOTS:
            return 0
        known = {slot.name: slot.shape for slot in self._layout}
        return sum(not _fits(partial, known.get(name)) for name, partial in partials.items())

    def merge(
        self, partials: Mapping[str, Partial], device: torch.device, on_fault: Callable[[Exception], None]
    ) -> dict[str, Tensor]:
        """The sums of all processes, by name; what a process does not have it adds nothing to.

        None at all where the collective fails: nothing was agreed, and this process has its own sums alone. No other is
        begun then, for the processes are no longer in step.
        """
        try:
            if not self.is_broken:
                return self._merge(partials, device, on_fault)
        except Exception as error:
            on_fault(error)
        return {}

    def _merge(
        self, partials: Mapping[str, Partial], device: torch.device, on_fault: Callable[[Exception], None]
    ) -> dict[str, Tensor]:
        self.is_broken = True  # until this is over, also where an interrupt comes
        if not self._is_agreed:
            self._layout, self._is_agreed = self._agree(partials), True
        own_N = self._flat(partials, device, on_fault)
        start = time.perf_counter()
        gathered_RN = own_N.new_empty(self.size, own_N.numel())
        dist.all_gather(list(gathered_RN.unbind()), own_N, group=self._group)
        self.waited_s += time.perf_counter() - start
        self.is_broken = False
        parts = torch.split(gathered_RN, self._sizes(), dim=1)
        return {
            slot.name: _merged(of_all_RN, slot.merge).view(slot.shape)
            for slot, of_all_RN in zip(self._layout, parts, strict=True)
        }

    def ask(self, numbers: Sequence[float], device: torch.device) -> Asked:
        """Begin to find the largest of each number of all processes, which call this at the same step. Does not wait."""
        self.is_broken = True  # until this is over, also where an interrupt comes
        # Not `torch.tensor`, which would wait for the device.
        largest = torch.cat([torch.full((1,), number, dtype=torch.float32, device=device) for number in numbers])
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self.is_broken = False
        return Asked(work, largest)

    def answer(self, asked: Asked) -> list[float]:
        """Return the largest numbers. Waits only for a process that has not called `ask` yet."""
        self.is_broken = True
        start = time.perf_counter()
        device = asked.largest.device
        # In a stream of its own: the training on the device neither waits nor is waited for.
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            asked.work.wait()
            numbers = asked.largest.tolist()
        self.waited_s += time.perf_counter() - start
        self.is_broken = False
        return numbers

    def _agree(self, partials: Mapping[str, Partial]) -> list[Slot]:
        """All names that some process has, each in the largest of its shapes. A model's stages differ in their heads."""
        mine = [*self._layout, *(Slot(name, p.merge, tuple(p.value.shape)) for name, p in partials.items())]
        slots: dict[str, Slot] = {}
        of_all = (slot for of_rank in self.exchange(mine) for slot in of_rank)
        for slot in sorted(
            of_all, key=lambda slot: (slot.name.startswith(GIVEN), slot)
        ):  # what is cut off is the user's
            known = slots.setdefault(slot.name, slot)
            if len(known.shape) == len(slot.shape):
                shape = tuple(map(max, known.shape, slot.shape))
                slots[slot.name] = known._replace(shape=shape)
        return list(slots.values())[:MAX_SLOTS]

    def _flat(
        self, partials: Mapping[str, Partial], device: torch.device, on_fault: Callable[[Exception], None]
    ) -> Tensor:
        nothing = [
            torch.full((size,), NOTHING[slot.merge]) for slot, size in zip(self._layout, self._sizes(), strict=True)
        ]
        own_N = torch.cat(nothing).to(device, torch.float64, non_blocking=True)
        for slot, room_N in zip(self._layout, torch.split(own_N, self._sizes()), strict=True):
            partial = partials.get(slot.name)
            if partial is not None and partial.merge == slot.merge and _fits(partial, slot.shape):
                try:
                    corner = room_N.view(slot.shape)
                    for axis, size in enumerate(partial.value.shape):
                        corner = corner.narrow(axis, 0, size)
                    corner.copy_(partial.value.detach(), non_blocking=True)
                except Exception as error:  # the others wait for this process, whatever it has to say
                    on_fault(error)
        return own_N

    def _sizes(self) -> list[int]:
        return [math.prod(slot.shape) for slot in self._layout]


def agree(ranks: Ranks, **settings: object) -> None:
    """Raise RanksDisagree unless all processes pass the same settings."""
    of_all = ranks.exchange(settings)
    for name, own in settings.items():
        for rank, other in enumerate(of_all):
            if other[name] != own:
                raise RanksDisagree(
                    f"attach({name}=) is the same on all ranks of process_group, got {own!r} here and {other[name]!r} in "
                    f"rank {rank}"
                )


class Stages(NamedTuple):
    """How the blocks of a model lie over processes."""

    names: list[str]
    """Of all blocks, in the order of depth."""
    first: int
    """The number of this process's first block."""
    size: int
    """How many processes hold the same blocks."""
    ranks: list[int]
    """One rank of each stage, in the order of depth."""


def arrange(of_all: list[tuple[int | None, list[str]]], rank: int) -> Stages:
    """The stages of a pipeline from what every rank calls its stage and its blocks; one where all are the same.

    Without numbers, stages stand in the order of ranks and ranks with the same names hold the same stage. Raises
    InvalidArgument where only some ranks give a number.
    """
    if len({number is None for number, _ in of_all}) > 1:
        raise InvalidArgument("stage= is given on all ranks of process_group or on none, got it on some")
    keys = [(number, tuple(names)) for number, names in of_all]
    stages = list(dict.fromkeys(keys))
    if of_all[0][0] is not None:
        stages.sort(key=lambda stage: stage[0] or 0)
        if len({number for number, _ in stages}) < len(stages):
            raise InvalidArgument("ranks of process_group with the same stage= have blocks of different names")
    own = stages.index(keys[rank])
    names = [name for _, names in stages for name in names]
    if len(set(names)) < len(names):
        names = [f"stage{place}.{name}" for place, (_, names) in enumerate(stages) for name in names]
    first = sum(len(names) for _, names in stages[:own])
    return Stages(names, first, keys.count(keys[rank]), [keys.index(stage) for stage in stages])


GIVEN, NUM_GIVEN = "given.", "#"
"""Begins the name of a scalar that the user gave to `monitor.step`, and ends that of how many ranks gave it."""


def given_partials(given: Mapping[str, Tensor | float]) -> dict[str, Partial]:
    """The scalars that the user gave; what is none is left to be complained of elsewhere."""
    found: dict[str, Partial] = {}
    for name, value in given.items():
        with contextlib.suppress(Exception):
            number = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value)).double()
            found[GIVEN + name] = Partial(number.reshape(()))
            found[GIVEN + name + NUM_GIVEN] = Partial(torch.ones((), dtype=torch.float64))
    return found


def given_means(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What all ranks together gave."""
    names = [name for name in sums if name.startswith(GIVEN) and not name.endswith(NUM_GIVEN)]
    return {name.removeprefix(GIVEN): sums[name] / sums[name + NUM_GIVEN] for name in names}


def _fits(partial: Partial, shape: tuple[int, ...] | None) -> bool:
    own = partial.value.shape
    return shape is not None and len(own) == len(shape) and all(n <= room for n, room in zip(own, shape, strict=True))


def _merged(of_all_RN: Tensor, merge: Merge) -> Tensor:
    """Maxima and minima of what nobody has measured are NaN."""
    if merge == "sum":
        return of_all_RN.sum(dim=0)
    found = of_all_RN.amax(dim=0) if merge == "max" else of_all_RN.amin(dim=0)
    return torch.where(found == NOTHING[merge], torch.nan, found)
