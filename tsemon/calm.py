"""Steps at which nothing stirs: their losses and gradient norms are kept, and looked at together."""

from __future__ import annotations

import math

from torch import Tensor
from torch._C import _is_torch_function_mode_enabled, _len_torch_dispatch_stack

NUM_TOGETHER, NUM_IN_MOTION = 16, 4
"""Steps whose numbers are looked at together; fewer while the limit falls, or is not known yet: a jump may stay below it."""


class Calm:
    """The numbers of a few steps in a row: finite floats, and no high loss among them.

    Between two steps the processor forgets all of tsemon's code, so only short code is fast. Looking at the numbers of all
    these steps together takes a third of the time.
    """

    __slots__ = ("floor", "limit", "losses", "norms", "num_together")

    def __init__(self, limit: float, num_together: int = NUM_TOGETHER, floor: float = -math.inf) -> None:
        """limit: a loss from here on may be high. floor: one up to here may have an unusual sign."""
        self.floor = floor
        self.limit = limit
        self.num_together = num_together
        self.losses: list[float] = []
        self.norms: list[float] = []

    def keep(self, loss: Tensor | float | None, grad_norm: Tensor | float | None) -> bool:
        """Keep the numbers of a step, which may be tensors on the CPU. False if they are anything else, or not usual."""
        if _is_torch_function_mode_enabled() or _len_torch_dispatch_stack():
            return False
        try:
            if type(loss) is Tensor and loss.is_cpu:
                loss = loss.item()
            if type(grad_norm) is Tensor and grad_norm.is_cpu:
                grad_norm = grad_norm.item()
        except RuntimeError:  # it is not one number, or a transform of torch.func hides it
            return False
        if loss is not None and not (type(loss) is float and self.floor < loss < self.limit):
            return False
        if grad_norm is not None:
            if not (type(grad_norm) is float and grad_norm - grad_norm == 0):
                return False
            self.norms.append(grad_norm)
        if loss is not None:
            self.losses.append(loss)
        return True

    @property
    def is_full(self) -> bool:
        return max(len(self.losses), len(self.norms)) >= self.num_together
