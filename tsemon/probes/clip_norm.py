"""The norm of the gradient at every step, as torch's clip functions compute it anyway."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from tsemon.probes.hooks import CallHandle, Guard, called_around, is_transformed

MAX_PARTS = 64
"""Maximum number of norms in a step: a loop that never calls `monitor.step()` must not fill the memory."""
GIVEN_THE_NORM = ((clip_grad, "_clip_grads_with_norm_"), (nn.utils, "clip_grads_with_norm_"))
"""Functions of (parameters, largest norm, norm): `clip_grad_norm_` calls the first, and users call the second."""


class ClipNorm:
    """Keeps the norms of the model's gradients until `take`. They stay on their device, and nothing waits for them."""

    def __init__(self, model: nn.Module, guard: Guard) -> None:
        self._ids = {id(p) for p in model.parameters()}
        self._guard = guard
        self._norms: list[Tensor] = []
        self._handles: list[CallHandle] = []
        for owner, name in GIVEN_THE_NORM:
            if (around := called_around(owner, name)) is not None:
                around.before.append(self)
                self._handles.append(CallHandle(around, around.before, self))

    # Between two steps the processor has forgotten all of this, so it runs unguarded and only keeps a reference.
    def __call__(self, parameters: object, max_norm: object = None, norm: object = None, *_: Any) -> None:
        start = perf_counter()
        if (
            type(norm) is Tensor
            and len(self._norms) < MAX_PARTS
            and self._are_ours(parameters)
            and not is_transformed()
        ):
            self._norms.append(norm)
        self._guard.cost_s += perf_counter() - start

    def _are_ours(self, parameters: object) -> bool:
        return type(parameters) is not list or any(id(p) in self._ids for p in parameters[:1])

    def take(self) -> Tensor | None:
        """Return the norm of the step that ends; None if no gradient was clipped by its norm."""
        if len(self._norms) > 1:
            self._guard.contain(self._merge)
        norm = self._norms[0] if len(self._norms) == 1 else None
        self._norms = []
        return norm

    def _merge(self) -> None:
        """Combine the norms of several parts of the gradient, each clipped by itself."""
        norms = [norm.reshape(()) for norm in self._norms]
        self._norms = [torch.stack([norm.to(norms[0]) for norm in norms]).norm()]

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
