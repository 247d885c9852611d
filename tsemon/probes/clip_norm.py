"""The norm of the gradient at every step, as `torch.nn.utils.clip_grad_norm_` computes it anyway."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from tsemon.probes.hooks import CallHandle, Guard, called_around, is_transformed

TRUSTED_STEPS = 16
"""Number of times that a list of parameters is clipped until it is checked again: parameters may train from then on."""
GIVEN_THE_NORM = "_clip_grads_with_norm_"
"""The function of (list of parameters, largest norm, norm) that `clip_grad_norm_` calls."""


class ClipNorm:
    """Keeps the norm of a step's gradient until `take`. It stays on its device, and nothing waits for it."""

    def __init__(self, model: nn.Module, guard: Guard) -> None:
        self._parameters = {id(p): p for p in model.parameters()}
        self._whole: tuple[int, int] | None = None
        """Id of the first parameter, and length, of a list that had all parameters that train: most steps clip it again."""
        self._num_trusted = 0
        """Number of times that it was clipped since it was checked."""
        self._is_used = False
        """Whether the norm has answered `is_finite` in this step."""
        self._guard = guard
        self._norm: Tensor | float | None = None
        self._num_clips = 0
        """Number of times that gradients were clipped in this step."""
        self._handle: CallHandle | None = None
        if (around := called_around(clip_grad, GIVEN_THE_NORM)) is not None:
            around.before.append(self)
            self._handle = CallHandle(around, around.before, self)

    # Between two steps the processor has forgotten all of this, so it runs unguarded and only keeps a reference.
    def __call__(self, parameters: object = None, max_norm: object = None, norm: object = None, *_: Any) -> None:
        start = perf_counter()
        if type(norm) is Tensor and type(parameters) is list and parameters and not is_transformed():
            clipped = id(parameters[0]), len(parameters)
            if clipped == self._whole and self._num_trusted < TRUSTED_STEPS:
                self._norm = norm
                self._num_trusted += 1
                self._num_clips += 1
            elif self._is_whole(parameters):
                self._whole, self._norm, self._num_trusted = clipped, norm, 0
                self._num_clips += 1
            elif not self._parameters.keys().isdisjoint(map(id, parameters)):
                self._whole = None
                self._num_clips += 1
        self._guard.cost_s += perf_counter() - start

    def _is_whole(self, parameters: list[object]) -> bool:
        """Whether all parameters that train are among them, perhaps beside a head, and the norm is the L2 norm."""
        try:
            caller = sys._getframe(3)  # clip_grad_norm_, which alone knows the kind of norm
            clipped, is_l2 = {*map(id, parameters)}, float(caller.f_locals.get("norm_type", 2.0)) == 2.0
            return is_l2 and all(key in clipped for key, p in self._parameters.items() if p.requires_grad)
        except Exception as error:
            self._guard.on_fault(error)
            return False

    def is_finite(self) -> bool:
        """Whether all gradients of this step are known to be finite already, because the norm of all together is.

        False if the norm is not on the CPU, where reading it would wait. A gradient that changes between clipping and
        the optimizer step is not seen.
        """
        norm = self._norm
        if norm is None or self._num_clips != 1 or self._is_used:
            return False
        if isinstance(norm, Tensor):
            if not norm.is_cpu:
                return False
            norm = self._norm = norm.item()
        self._is_used = True  # one norm speaks for one step of an optimizer
        return norm - norm == 0

    def take(self) -> Tensor | float | None:
        """Return the L2 norm of the step that ends. None if the gradient was not clipped as a whole by it, once."""
        norm = self._norm if self._num_clips == 1 else None
        self._norm, self._num_clips, self._is_used = None, 0, False
        return norm

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
