"""Norms of gradients before clipping, whatever code clips them.

A gradient is read when torch's clip functions are called, before they change it. Clipping by hand, or by another library,
calls none of them; so the gradient is also read at the end of every backward pass, when all of it has accumulated and data
parallel wrappers have averaged it, and again when torch's GradScaler has taken the loss scale out of it.

Axes: P parameters, Q parts of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from tsemon.measures.parameters import joined, norms, together
from tsemon.probes.groups import is_sharded, local
from tsemon.probes.hooks import Guarded, Hooks
from tsemon.probes.query_key import Slices

BY_CLIPPING = "_group_tensors_by_device_and_dtype"
"""The helper that every clip function of torch calls with the gradients before it changes them."""

SAME = 1e-5
"""Relative difference of two equal factors."""
EXACT = 3e-7
"""Relative difference between a factor and a whole number or a power of two."""
MAX_COUNT = 2**16
"""Maximum number of batches or tokens that a loop divides its gradients by: every larger factor is near a whole number."""


Fate = Literal["as it is", "unseen", "clipped", "unless changed", "unless rescaled"]
"""How the norm before clipping is known: it is the present one, unknown, the one that was read, or this on a condition."""


class Norms(NamedTuple):
    """Norms of gradients in float64. NaN if the gradient before clipping is not known."""

    before_P: Tensor
    """Before clipping."""
    now_P: Tensor
    parts_Q: Tensor
    """Of the parts of slices, before clipping."""
    owners: list[int]
    """The place of the parameter of each part."""


class BeforeClipping:
    """Norms of all gradients of one step, and of the given slices of them."""

    def __init__(self, model: nn.Module, slices: Mapping[int, Sequence[Slices]]) -> None:
        """`slices`: by the parameter's id."""
        self._slices = slices
        self._watched: dict[int, nn.Parameter] = {}
        self._fresh: dict[int, nn.Parameter] = {}
        """Parameters whose gradient has grown since it was read, by their id."""
        self._kept: list[Tensor] = []
        """Norms that were read, as a few long vectors: a tensor for each would keep Python's garbage collector busy."""
        self._places: dict[int, int] = {}
        """Where in them the norm of each parameter's gradient is, by its id."""
        self._part_places: dict[int, list[int]] = {}
        self._clipped: set[int] = set()
        """Parameters whose gradient torch has clipped since it last grew."""
        self._task = -1
        self._hooks: Hooks | None = None
        num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        is_averaged = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        self.may_be_averaged_later = num_processes > 1 and not is_averaged
        """True if the training loop may average gradients over processes itself, after the backward pass."""
        self.num_unseen = 0
        """Number of gradients that the optimizer got and no backward pass of this step has made."""

    def listen(self, hooks: Hooks, params: Sequence[nn.Parameter]) -> None:
        self._hooks = hooks
        self._watched = {id(p): p for p in params if p.requires_grad and p.is_leaf}
        hooks.accumulated(self._watched.values(), self._note)
        hooks.around_call(clip_grad, BY_CLIPPING, before=self._before_clipping)
        hooks.around_call(torch.amp.GradScaler, "_unscale_grads_", after=self._after_unscaling)

    def norms_of(self, params: Sequence[nn.Parameter]) -> Norms:
        """Return the norms of the gradients that an optimizer steps with now, of one parameter at least."""
        now_E, owners = self._read(params)
        fates = [self._fate(p) for p in params]
        self.num_unseen += fates.count("unseen")
        self._keep([p for p in params if id(p) not in self._places])  # the present norms stand in for what is not known
        places = [self._places[id(p)] for p in params]
        places += [place for owner in dict.fromkeys(owners) for place in self._part_places[id(params[owner])]]
        *kept, now_E = together([*self._kept, now_E])
        kept_N = torch.cat(kept)
        before_E = kept_N.index_select(0, _index(places, kept_N))

        def is_fate(fate: Fate) -> Tensor:
            return _index([found == fate for found in fates], now_E)

        now_P, before_P = now_E[: len(params)], before_E[: len(params)]
        may_be_P = is_fate("unless rescaled")
        is_rescaled = _is_rescaled(*(torch.where(may_be_P, norms_P, 0.0) for norms_P in (before_P, now_P)))
        is_now_P = is_fate("as it is") | (may_be_P & is_rescaled)
        is_unknown_P = is_fate("unseen") | (is_fate("unless changed") & (before_P != now_P))
        of_param_E = _index([*range(len(params)), *owners], now_E)
        found_E = torch.where(is_now_P[of_param_E], now_E, before_E)
        found_E = torch.where(is_unknown_P[of_param_E], torch.nan, found_E)
        return Norms(found_E[: len(params)], now_P, found_E[len(params) :], owners)

    @property
    def has_read(self) -> bool:
        return bool(self._kept)

    def forget(self, params: Sequence[nn.Parameter]) -> None:
        """Stop reading these gradients, because their optimizer has made the step that is measured."""
        for p in params:
            self._watched.pop(id(p), None)
            self._places.pop(id(p), None)

    def _fate(self, p: nn.Parameter) -> Fate:
        """Return the change of the gradient that may have happened since it was read."""
        is_clipped, is_in_backward = id(p) in self._clipped, torch._C._current_graph_task_id() != -1
        if not is_clipped and (is_in_backward or id(p) in self._fresh):
            return "as it is"  # an optimizer that steps in the backward pass, as soon as the gradient is there
        if id(p) not in self._places:
            return "unseen"
        if is_clipped:
            return "clipped"
        return "unless changed" if self.may_be_averaged_later and not is_sharded(p) else "unless rescaled"

    # The hooks.

    def _note(self, p: nn.Parameter) -> None:
        if id(p) not in self._watched:
            return
        self._fresh[id(p)] = p
        self._clipped.discard(id(p))
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task) and self._hooks is not None:
            self._task = task
            _at_end_of_backward(Guarded(self._hooks, self._after_others))

    def _after_others(self) -> None:
        """Let callbacks that were queued meanwhile run first: DistributedDataParallel averages in one."""
        if self._hooks is not None:
            _at_end_of_backward(Guarded(self._hooks, self._after_backward))

    def _after_backward(self) -> None:
        self._keep([p for p in self._fresh.values() if id(p) not in self._clipped])
        self._fresh.clear()

    def _before_clipping(self, tensors: Sequence[Sequence[Tensor]], *_: object) -> None:
        clipped = {id(tensor) for of_one in tensors for tensor in of_one}
        params = [p for p in self._watched.values() if p.grad is not None and id(p.grad) in clipped]
        self._keep([p for p in params if id(p) not in self._clipped])
        self._clipped |= {id(p) for p in params}

    def _after_unscaling(self, _: object, optimizer: torch.optim.Optimizer, by: Tensor, *rest: object) -> None:
        known = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._places]
        clipped = [p for p in known if id(p) in self._clipped]
        if clipped:  # before it was unscaled
            kept_N = torch.cat(together(self._kept))
            places = [place for p in clipped for place in (self._places[id(p)], *self._part_places.get(id(p), ()))]
            is_clipped_N = torch.zeros_like(kept_N, dtype=torch.bool).index_fill(0, _index(places, kept_N), value=True)
            self._kept = [torch.where(is_clipped_N, kept_N * by.to(kept_N.device, non_blocking=True), kept_N)]
        self._keep([p for p in known if id(p) not in self._clipped])

    # The norms.

    def _keep(self, params: Sequence[nn.Parameter]) -> None:
        """Read the norms, and remember where they are among all that are kept."""
        dense = [p for p in params if p.grad is not None and not p.grad.is_sparse]
        if not dense:
            return
        norms_E, owners = self._read(dense)
        start = sum(map(len, self._kept))
        self._kept.append(norms_E)
        for place, p in enumerate(dense, start):
            self._places[id(p)] = place
        for owner in dict.fromkeys(owners):
            self._part_places[id(dense[owner])] = []
        for place, owner in enumerate(owners, start + len(dense)):
            self._part_places[id(dense[owner])].append(place)

    def _read(self, params: Sequence[nn.Parameter]) -> tuple[Tensor, list[int]]:
        """Return the norms of all gradients, then those of the parts of their slices, and the owner of each part."""
        parts = [
            (owner, part)
            for owner, p in enumerate(params)
            for slices in self._slices.get(id(p), ())
            for part in slices.of(_gradient(p))
        ]
        tensors = [local(_gradient(p)) for p in params] + [part for _, part in parts]
        return joined(norms(tensors)), [owner for owner, _ in parts]


def _index(values: Sequence[int] | Sequence[bool], like: Tensor) -> Tensor:
    return torch.tensor(values).to(like.device, non_blocking=True)


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def _is_rescaled(before_P: Tensor, now_P: Tensor) -> Tensor:
    """True if the loop divided all gradients by a loss scale or by a number of batches or tokens.

    Clipping never makes a gradient larger, and hardly ever divides it by a whole number or a power of two.
    """
    factor = before_P.square().sum().sqrt() / now_P.square().sum().sqrt()
    is_one_factor = ((before_P - factor * now_P).abs() <= SAME * before_P).all()
    power = factor.log2()
    is_power = (power - power.round()).abs() < EXACT
    is_number = ((factor - factor.round()).abs() < EXACT * factor) & (factor <= MAX_COUNT)
    return is_one_factor & ((factor < 1 - SAME) | is_power | is_number)


def _at_end_of_backward(callback: Guarded) -> None:
    Variable._execution_engine.queue_callback(callback)
