"""The norm of the gradient at every step, as `torch.nn.utils.clip_grad_norm_` computes it anyway."""

from __future__ import annotations

from time import perf_counter
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from tsemon.probes.hooks import CallHandle, Guard, called_around, is_transformed

GIVEN_THE_NORM = "_clip_grads_with_norm_"
"""The function of (list of parameters, largest norm, norm) that `clip_grad_norm_` calls."""


class ClipNorm:
    """Keeps the norm of a step's gradient until `take`. It stays on its device, and nothing waits for it."""

    def __init__(self, model: nn.Module, guard: Guard) -> None:
        self._ids = {id(p) for p in model.parameters()}
        self._first: object = None
        """The first parameter of the model that was first in a list: most steps clip the same list again."""
        self._whole: tuple[int, int] | None = None
        """Id of the first parameter, and length, of a list that had all parameters of the model."""
        self._guard = guard
        self._norm: Tensor | float | None = None
        self._num_clips = 0
        """Number of times that gradients were clipped in this step."""
        self._clipped: tuple[int, int] | None = None
        """The same of the list that was clipped in this step."""
        self._handle: CallHandle | None = None
        if (around := called_around(clip_grad, GIVEN_THE_NORM)) is not None:
            around.before.append(self)
            self._handle = CallHandle(around, around.before, self)

    # Between two steps the processor has forgotten all of this, so it runs unguarded and only keeps a reference.
    def __call__(self, parameters: object = None, max_norm: object = None, norm: object = None, *_: Any) -> None:
        start = perf_counter()
        if type(norm) is Tensor and self._are_ours(parameters) and not is_transformed():
            self._norm = norm
            self._num_clips += 1
            self._clipped = id(parameters[0]), len(parameters)
            if self._clipped != self._whole and len(parameters) >= len(self._ids) and self._has_all(parameters):
                self._whole = self._clipped
        self._guard.cost_s += perf_counter() - start

    def _are_ours(self, parameters: object) -> TypeGuard[list[object]]:
        """Whether the first or the last one is a parameter of the model. A head of its own may be before or behind them."""
        if type(parameters) is not list or not parameters:
            return False
        first = parameters[0]
        if first is self._first:
            return True
        if id(first) in self._ids:
            self._first = first
            return True
        return id(parameters[-1]) in self._ids

    def _has_all(self, parameters: list[object]) -> bool:
        return self._ids <= {id(p) for p in parameters}

    def is_finite(self) -> bool:
        """Whether all gradients of this step are known to be finite already, because the norm of all together is.

        False if the norm is not on the CPU, where reading it would wait. A gradient that changes between clipping and
        the optimizer step is not seen.
        """
        norm = self._norm
        if norm is None or self._num_clips != 1 or self._clipped is None or self._clipped != self._whole:
            return False
        if isinstance(norm, Tensor):
            if not norm.is_cpu:
                return False
            norm = self._norm = norm.item()
        self._clipped = None  # one norm speaks for one step of an optimizer
        return norm - norm == 0

    def take(self) -> Tensor | float | None:
        """Return the norm of the step that ends. None if the gradient was not clipped as a whole by its norm."""
        norm = self._norm if self._num_clips == 1 else None
        self._norm, self._num_clips = None, 0
        return norm

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
