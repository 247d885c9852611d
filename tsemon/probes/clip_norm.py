"""The norm of the gradient at every step, as `torch.nn.utils.clip_grad_norm_` computes it anyway."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from tsemon.probes.hooks import CallHandle, Guard, called_around, is_transformed

GIVEN_THE_NORM = "_clip_grads_with_norm_"
"""The function of (list of parameters, largest norm, norm) that `clip_grad_norm_` calls."""


class ClipNorm:
    """Keeps the norm of a step's gradient until `take`. It stays on its device, and nothing waits for it."""

    def __init__(self, model: nn.Module, guard: Guard) -> None:
        self._ids = {id(p) for p in model.parameters()}
        self._guard = guard
        self._norm: Tensor | None = None
        self._num_clips = 0
        """Number of times that gradients were clipped in this step."""
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
        self._guard.cost_s += perf_counter() - start

    def _are_ours(self, parameters: object) -> bool:
        """Whether the first or the last one is a parameter of the model. A head of its own may be before or behind them."""
        if type(parameters) is not list or not parameters:
            return False
        return id(parameters[0]) in self._ids or id(parameters[-1]) in self._ids

    def take(self) -> Tensor | None:
        """Return the norm of the step that ends. None if the gradient was not clipped as a whole by its norm."""
        norm = self._norm if self._num_clips == 1 else None
        self._norm, self._num_clips = None, 0
        return norm

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
