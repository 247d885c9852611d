"""Notice a gradient that is not finite before the optimizer spreads it to all parameters.

A NaN in the loss makes all gradients NaN, so one entry of a small gradient stands for the others. It is read before each
step of the optimizers, on the CPU only: on other devices this would wait.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _is_torch_function_mode_enabled, _len_torch_dispatch_stack
from torch.compiler import is_compiling

from tsemon.probes.clip_norm import ClipNorm
from tsemon.probes.discovery import Block
from tsemon.probes.groups import is_sharded
from tsemon.probes.hooks import Guard, is_transformed

SHORT = 128
"""A list of at most this many entries is made faster than a tensor of one entry."""
MAX_LOOKS = 8
"""How often NaN may begin again in a run."""


class Witness:
    """A hook of the optimizers that calls a function when the gradient is not finite.

    It does so once, and then again only after `renew`.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        optimizers: Sequence[torch.optim.Optimizer],
        guard: Guard,
        on_nonfinite: Callable[[], None],
        clip_norm: ClipNorm | None,
    ) -> None:
        self._parameter, self._guard, self._clip_norm = parameter, guard, clip_norm
        self._is_short = len(parameter) <= SHORT
        self._on_nonfinite = weakref.WeakMethod(on_nonfinite)  # an optimizer must not keep the monitor
        self.is_done = False
        self._num_looks_left = MAX_LOOKS
        self.why_not = "the optimizer took no step with a gradient that is not finite"
        """Why nothing was noticed."""
        self._handles = [optimizer.register_step_pre_hook(self) for optimizer in optimizers]

    def close(self) -> None:
        self.is_done, self._num_looks_left = True, 0
        while self._handles:
            self._handles.pop().remove()

    @property
    def has_spread(self) -> bool:
        """Whether the parameter itself is not finite, as after a step that the optimizer did not skip."""
        return not math.isfinite(self._parameter.detach()[0].item())

    def renew(self) -> None:
        """At a sample: look again if the parameter and its gradient are finite, as after a checkpoint was loaded."""
        if not self._num_looks_left:
            self.close()
        elif self.is_done and not self.has_spread:
            gradient = self._parameter.grad
            self.is_done = gradient is not None and not math.isfinite(gradient[0].item())

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Between two steps the processor has forgotten all of this. Therefore it runs unguarded, and reads a single entry,
        # or, in a tenth of the time, a number that torch has computed. Where the user's modes could see that, it does not.
        if is_compiling():
            return
        start = perf_counter()
        if not (_is_torch_function_mode_enabled() or _len_torch_dispatch_stack()):
            try:
                is_finite = self._clip_norm is not None and self._clip_norm.is_finite()
                if not is_finite and type(gradient := self._parameter.grad) is Tensor:
                    if not gradient.is_cpu:
                        self._give_up(
                            "the model has moved to another device since attach(), which reading would wait for"
                        )
                        return
                    entry = gradient.tolist()[0] if self._is_short else gradient[0].item()
                    if entry - entry != 0:
                        self._meet(optimizer, args, kwargs)  # which counts its own time
                        return
            except Exception as error:
                self._give_up("reading the gradient failed")
                self._guard.on_fault(error)
        self._guard.cost_s += perf_counter() - start

    def _give_up(self, why: str) -> None:
        """The hook is taken out later: the optimizer goes through its hooks now."""
        self.is_done, self._num_looks_left, self.why_not = True, 0, why

    def _meet(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_done or is_transformed() or getattr(optimizer, "found_inf", None) is not None:
            return  # found_inf: a gradient scaler skips the step
        self.is_done = True
        self._num_looks_left -= 1
        if any(closure is not None for closure in (*args[1:2], kwargs.get("closure"))):  # Accelerate passes None
            self._give_up("the optimizer is given a closure, which computes the gradients after they are read")
        elif (on_nonfinite := self._on_nonfinite()) is not None:
            on_nonfinite()


def choose_witness(blocks: Sequence[Block], optimizers: Sequence[torch.optim.Optimizer]) -> nn.Parameter | None:
    """Return the smallest vector of the first block that trains one: its gradient has come through all other blocks."""
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for block in blocks:
        own = [p for p in block.module.parameters() if id(p) in trained and p.requires_grad and is_readable(p)]
        if vectors := [p for p in own if p.ndim == 1 and len(p)]:
            return min(vectors, key=len)
    return None


class NonfiniteParameters(NamedTuple):
    """The parameters that are not finite."""

    names: Sequence[str]
    num_read: int
    """Number of all parameters that could be read."""

    @property
    def are_most(self) -> bool:
        """True for more than half of all parameters, as after a step of an optimizer that spreads NaN."""
        return 2 * len(self.names) > self.num_read

    def __str__(self) -> str:
        if not self.names:
            return "all parameters were finite"
        num_others = len(self.names) - 1
        others = f" and {num_others} other{'s' * (num_others > 1)} were" if num_others else " was"
        return f"{self.names[0]}{others} not finite"


def nonfinite_parameters(model: nn.Module) -> NonfiniteParameters:
    """Read all parameters that are on the CPU."""
    parameters = [(name, p) for name, p in model.named_parameters() if is_readable(p)]
    return NonfiniteParameters([name for name, p in parameters if not p.isfinite().all()], len(parameters))


def is_readable(parameter: Tensor) -> bool:
    """Whether its values are here, on the CPU."""
    return parameter.device.type == "cpu" and parameter.is_floating_point() and not is_sharded(parameter)
