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

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        self._on_fault = on_fault
        self._handles: list[Any] = []
        self.cost_s = 0.0
        """Seconds spent inside hooks since this object was made, on the thread that trains."""

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call hook(module, args, kwargs) before the module's forward."""
        self._handles.append(module.register_forward_pre_hook(Guarded(self, hook), with_kwargs=True))

    def after(self, module: nn.Module, hook: Callable[..., None], *, always: bool = False) -> None:
        """Call hook(module, args, kwargs, output) after the module's forward; `always`: also when that raised."""
        handle = module.register_forward_hook(Guarded(self, hook), with_kwargs=True, always_call=always)
        self._handles.append(handle)

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

    def __init__(self, hooks: Hooks | None, hook: Callable[..., None] | None) -> None:
        self._hooks = hooks
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        if self._hooks is not None and self._hook is not None:
            self._hooks.guard(self._hook, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Guarded:
        return Guarded(None, None)

    def __reduce__(self) -> tuple[type[Guarded], tuple[None, None]]:
        return Guarded, (None, None)
