"""Detect training loops that misuse the monitor, and warn once.

The first calls of `monitor.step()` show whether it is called once after each optimizer step: until that is clear, a few
light hooks write down what happens between two calls, as letters. F: a training pass begins. B: a backward pass reaches
the blocks. S: an optimizer has stepped. U: a gradient scaler has looked at the gradients; it may skip the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tsemon.probes.discovery import Block
from tsemon.probes.groups import is_sharded
from tsemon.probes.hooks import Hooks

MAX_IDLE = 10
"""Samples without a step of the attached optimizers, after which steps of others are reported."""
MAX_STEPS_UNCALLED = 20
"""Optimizer steps without a call of `monitor.step()` after which it is taken for forgotten."""
MIN_CALLS = 2
"""Calls that are watched in any case: the second tells whether every step is followed by several."""
MAX_CALLS = 64
"""Calls after which no pattern is looked for any more."""
NUM_STEPS = 3
"""Optimizer steps, each with the calls before it, that make a pattern."""


class Usage:
    """How one training loop uses its monitor."""

    def __init__(
        self,
        hooks: Hooks,
        model: nn.Module,
        gate: nn.Module | None,
        blocks: Sequence[Block],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        has_group: bool,
        warn: Callable[[str], None],
    ) -> None:
        """`gate`: a module through which every training pass comes, None where hooks would be compiled."""
        self._hooks = hooks
        self._model = model
        self._optimizers = {id(optimizer): optimizer for optimizer in optimizers}
        self._has_group = has_group
        self._warn = warn
        self._told: set[str] = set()
        inside = {id(module) for module in model.modules()}
        self._blocks = [block for block in blocks if id(block.module) in inside]
        self._num_kept, self._num_replaced = self._count_parameters()
        self._calls: list[str] = []
        """For each call of `monitor.step()`, what happened before it; the same letter several times in a row is one."""
        self._now = ""
        self._num_steps = dict.fromkeys(self._optimizers, 0)
        self._stepped_in_sample: dict[int, torch.optim.Optimizer] = {}
        self._num_idle = 0
        """Samples in a row in which only optimizers that `attach` was not given made steps."""
        self.is_watching = bool(optimizers)
        """Whether it is not clear yet how often `monitor.step()` is called."""
        if self.is_watching:
            self._watch_steps()
            if gate is not None:
                hooks.before(gate, self._passed)
            trained = (next((p for p in block.module.parameters() if p.requires_grad), None) for block in blocks)
            hooks.accumulated({id(p): p for p in trained if p is not None}.values(), lambda _: self._note("B"))
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()) or any(
            map(is_sharded, model.parameters())
        ):
            self._check_rank()

    def called(self) -> None:
        """`monitor.step()` was called."""
        self._calls.append(self._now)
        self._now = ""
        if len(self._calls) == 1 and is_step(self._calls[0]):
            self._hooks.remove()  # the model's hooks: from here on only the number of steps is open
            self._watch_steps()
        if (found := verdict(self._calls)) is not None:
            self.stop()
            if found:
                self._tell("calls", found)

    def close(self) -> None:
        """No call comes any more."""
        if self.is_watching and not self._calls and max(self._num_steps.values()) > 1:
            self._tell_uncalled()
        self.stop()

    def stop(self) -> None:
        """Take the hooks out."""
        self.is_watching = False
        self._hooks.remove()

    def arm(self, hooks: Hooks) -> None:
        """Look for replacements before a sampled step, and for other optimizers in it."""
        self._stepped_in_sample = {}
        if self._optimizers:
            hooks.after_any_step(self._stepped_once)
        inside = {id(module) for module in self._model.modules()}
        if gone := [block.name for block in self._blocks if id(block.module) not in inside]:
            self._tell(
                "blocks",
                f"{len(gone)} of {len(self._blocks)} blocks are no longer in the model, the first is {gone[0]}: they were "
                "replaced after attach(), and what replaced them is not measured. Close the monitor and attach() again",
            )
        num_kept, num_replaced = self._count_parameters()
        if num_kept < self._num_kept and num_replaced > self._num_replaced:
            self._tell(
                "parameters",
                f"{self._num_kept - num_kept} of {self._num_kept} parameters that the optimizer trains are no longer in the "
                "model: they were replaced after attach(). Make the optimizer after the last change of the model, then "
                "attach()",
            )

    def end_sample(self) -> None:
        """Warn if other optimizers than the attached ones made the steps of this sample."""
        if self._stepped_in_sample.keys() & self._optimizers.keys():
            self._num_idle = 0
            return
        own = _parameters(self._optimizers.values())
        for other in self._stepped_in_sample.values():
            if shared := own & _parameters([other]):
                self._tell(
                    "optimizer",
                    f"the optimizer given to attach() makes no steps, and {type(other).__name__}, which attach() was not "
                    f"given, trains {len(shared)} of its parameters: was it replaced after attach()? Close the monitor and "
                    "attach() again with the optimizer that trains",
                )
        self._num_idle += bool(self._stepped_in_sample) and bool(self._optimizers)
        if self._num_idle == MAX_IDLE:
            others = ", ".join(sorted({type(other).__name__ for other in self._stepped_in_sample.values()}))
            self._tell(
                "optimizer",
                f"in {MAX_IDLE} samples the optimizer given to attach() made no step, but {others} did, with parameters of "
                "another model: was the model built or copied again after attach()? Close the monitor and attach() again",
            )
        self._stepped_in_sample = {}

    # The hooks.

    def _watch_steps(self) -> None:
        self._hooks.after_any_step(self._stepped)
        self._hooks.around_call(torch.amp.GradScaler, "_unscale_grads_", after=lambda *_: self._note("U"))

    def _note(self, event: str) -> None:
        if not self._now.endswith(event):
            self._now += event

    def _passed(self, *_: object) -> None:
        if self._hooks.guard.is_grad_enabled:
            self._note("F")
            if DistributedDataParallel._get_active_ddp_module() is not None:  # type: ignore[no-untyped-call]
                self._check_rank()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._note("S")
        if id(optimizer) in self._num_steps:
            self._num_steps[id(optimizer)] += 1
            if not self._calls and self._num_steps[id(optimizer)] == MAX_STEPS_UNCALLED:
                self._tell_uncalled()

    def _stepped_once(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._stepped_in_sample[id(optimizer)] = optimizer

    # What is said.

    def _check_rank(self) -> None:
        is_one_of_several = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
        if is_one_of_several and not self._has_group:
            self._tell(
                "rank",
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} that train one model together, and "
                "attach() got no process_group: it measures its own batches and sends frames of its own. "
                "Pass attach(process_group=...) on all ranks, or attach on rank 0 only",
            )

    def _tell_uncalled(self) -> None:
        self._tell(
            "uncalled",
            f"the optimizer made {max(self._num_steps.values())} steps since attach() without a call of monitor.step(), so "
            "nothing is measured. Call monitor.step(loss=loss) after each optimizer step",
        )

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._warn(text)

    def _count_parameters(self) -> tuple[int, int]:
        """How many of the parameters that the optimizers train are in the model, and how many are not."""
        trained = _parameters(self._optimizers.values())
        num_kept = len(trained & {id(p) for p in self._model.parameters()})
        return num_kept, len(trained) - num_kept


def verdict(calls: Sequence[str]) -> str | None:
    """Return the mistake that these calls show, an empty text if they show none, None if more calls must be seen."""
    steps = [number for number, events in enumerate(calls) if is_step(events)]
    if steps[:MIN_CALLS] == [*range(MIN_CALLS)] or len(calls) >= MAX_CALLS:
        return ""
    if len(steps) < NUM_STEPS:
        return None
    gaps = [later - earlier for earlier, later in pairwise(steps[:NUM_STEPS])]
    if min(gaps) > 1:
        return (
            f"monitor.step() is called {min(gaps)} times per optimizer step: with gradient accumulation, call it once after "
            "optimizer.step(), not after each backward pass"
        )
    seen = [calls[number] for number in steps[:NUM_STEPS]]
    if max(gaps) > 1 or 0 in steps or not calls[0]:
        return ""
    if all("B" in events and events.rfind("B") > events.rfind("S") for events in seen):
        return (
            "monitor.step() is called between the backward pass and optimizer.step(), so each sample has the update of the "
            "step before: call it after optimizer.step()"
        )
    if "B" not in calls[0] and all(events.endswith("F") for events in seen):
        return (
            "monitor.step() is called before the backward pass, so each sample has the gradients and the update of the step "
            "before: call it after optimizer.step()"
        )
    return ""


def is_step(events: str) -> bool:
    """True if there was a step of an optimizer, or one that a gradient scaler skipped."""
    return "S" in events or "U" in events


def _parameters(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
