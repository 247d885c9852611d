"""Hooks that are guests: they return nothing, raise nothing, leave nothing behind, and know what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class Hooks:
    """The hooks of one sampled step. Everything that is registered here is gone after `remove`."""

    def __init__(self, model: nn.Module, on_fault: Callable[[Exception], None]) -> None:
        self._model = model
        self._on_fault = on_fault
        self._handles: list[Any] = []
        self.cost_s = 0.0
        """Seconds spent inside hooks since this object was made, on the thread that trains."""

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call hook(module, args, kwargs) before the module's forward in a training pass."""
        guarded = Guarded(self, hook, only_in_training=True)
        self._handles.append(module.register_forward_pre_hook(guarded, with_kwargs=True))

    def after(self, module: nn.Module, hook: Callable[..., None], *, always: bool = False) -> None:
        """Call hook(module, args, kwargs, output) after the module's forward in a training pass.

        `always`: also when the forward raised.
        """
        guarded = Guarded(self, hook, only_in_training=True)
        self._handles.append(module.register_forward_hook(guarded, with_kwargs=True, always_call=always))

    def around_step(
        self, optimizer: torch.optim.Optimizer, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        """Call before(optimizer, ...) and after(optimizer, ...) around the optimizer's step."""
        self._handles.append(optimizer.register_step_pre_hook(Guarded(self, before)))
        self._handles.append(optimizer.register_step_post_hook(Guarded(self, after)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def is_training(self) -> bool:
        """Whether this forward pass is for training and not an evaluation between two steps.

        Either sign will do: some train in eval mode to be rid of dropout, and reentrant checkpointing runs the training
        pass without gradients.
        """
        return self._model.training or torch.is_grad_enabled()

    def guard(self, hook: Callable[..., None], *args: Any) -> None:
        """Run `hook`, count its time, and contain whatever goes wrong in it."""
        start = time.perf_counter()
        try:
            with torch.no_grad(), _full_precision():
                hook(*args)
        except Exception as error:
            self._on_fault(error)
        finally:
            self.cost_s += time.perf_counter() - start


@contextmanager
def _full_precision() -> Iterator[None]:
    """Without autocast, which would turn a float32 product inside a hook into a bfloat16 one."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Guarded:
    """One hook. A model that is copied or pickled while it is hooked must not take the monitor along."""

    def __init__(self, hooks: Hooks | None, hook: Callable[..., None] | None, only_in_training: bool = False) -> None:
        self._hooks = hooks
        self._hook = hook
        self._only_in_training = only_in_training

    def __call__(self, *args: Any) -> None:
        if self._hooks is None or self._hook is None or (self._only_in_training and not self._hooks.is_training()):
            return
        self._hooks.guard(self._hook, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Guarded:
        return Guarded(None, None)

    def __reduce__(self) -> tuple[type[Guarded], tuple[None, None]]:
        return Guarded, (None, None)
