"""Run a model once more, on held sequences, and leave no trace of it.

Where blocks run compiled no hook fires in them, and a model whose parameters are scaled is not the one that trains: what
is measured there comes from a pass of its own. It runs a stand-in for the uncompiled module, in eval mode without gradients,
between an optimizer's step and the next forward pass.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tsemon.errors import InvalidArgument
from tsemon.probes.discovery import eagerly, has_compiled
from tsemon.probes.held import HeldBatch
from tsemon.probes.hooks import full_precision
from tsemon.probes.stand_in import stand_in

MAX_FAILURES = 3
"""So often a pass may fail before it is given up for good."""


Prepare = Callable[[Mapping[nn.Module, nn.Module]], None]
"""Is given what stands in for each module of the model."""


class ExtraPass:
    """One kind of pass over the held batch, and what became of it."""

    def __init__(self, held: HeldBatch) -> None:
        self._held = held
        self._num_failures = 0
        self.why_not: str | None = None
        """Why the last pass that was asked for did not come about."""

    def run(
        self,
        prepare: Prepare,
        scale: float = 1.0,
        change: Callable[[], Callable[[Tensor], Tensor]] = lambda: Tensor.clone,
    ) -> None:
        """Run a stand-in with all parameters times `scale`; `prepare` may hook it, and is called for each try.

        change: makes a function that copies each tensor of the inputs.

        Raises what the model raises, unless the whole batch runs where its beginning did not.
        """
        if self._num_failures >= MAX_FAILURES:
            return
        self.why_not = _why_impossible(self._held)
        while self.why_not is None:
            try:
                self._pass(prepare, scale, change())
                return
            except Exception as error:
                # What does not fit into memory will not fit in larger.
                if isinstance(error, torch.OutOfMemoryError) or not self._held.reject():
                    self._fail(error)
                    raise

    def _pass(self, prepare: Prepare, scale: float, change: Callable[[Tensor], Tensor]) -> None:
        model, inputs = self._held.module, self._held.inputs
        if inputs is not None:
            with _undisturbed(model):
                try:
                    modules = stand_in(model, scale)
                except InvalidArgument as error:
                    self._num_failures, self.why_not = MAX_FAILURES, f"there is no stand-in for the model: {error}"
                    return
                prepare(modules)
                copied = inputs.map(change)
                modules[model](*copied.args, **copied.kwargs)
            self._held.accept()

    def _fail(self, error: Exception) -> None:
        self._num_failures += 1
        next_time = "given up" if self._num_failures == MAX_FAILURES else "the next sample tries again"
        self.why_not = (
            f"an extra pass in eval mode over {self._held} raised {type(error).__name__}: {error} ({next_time})"
        )


def _why_impossible(held: HeldBatch) -> str | None:
    modules = {type(module).__name__ for module in held.module.modules()}
    if "FullyShardedDataParallel" in modules or any(map(_is_sharded, held.module.parameters())):
        return "its parameters are sharded over processes, so an extra pass would have to gather them"
    if held.inputs is None:
        caller = (
            "a function that torch.compile made calls it" if has_compiled() else "another method than forward is called"
        )
        return held.why_not or (
            f"no training pass came through {type(held.module).__name__} since attach, so no sequences are held for an "
            f"extra pass. If {caller}, give attach(..., probe_batch=...)"
        )
    return None


def _is_sharded(parameter: Tensor) -> bool:
    """By FSDP2 and tensor parallelism, or by DeepSpeed."""
    return hasattr(parameter, "to_local") or hasattr(parameter, "ds_id")


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Out of the user's contexts, with the random states put back: eager, no gradients, no autocast, no fused encoder, and
    silent."""
    cuda = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    python, has_fast_path = random.getstate(), torch.backends.mha.get_fastpath_enabled()
    numpy = sys.modules.get("numpy")
    with ExitStack() as stack:
        stack.callback(random.setstate, python)
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.callback(torch.backends.mha.set_fastpath_enabled, has_fast_path)
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        for context in (silent(), torch.no_grad(), full_precision(), _disable_current_modes(), eagerly()):
            stack.enter_context(context)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            stack.enter_context(NoCommunication())  # type: ignore[no-untyped-call]
        torch.backends.mha.set_fastpath_enabled(False)  # hooks see nothing of it
        yield


class ThisThread:
    """Matches the text of every warning, on one thread, until it is closed."""

    def __init__(self) -> None:
        self._ident: int | None = threading.get_ident()

    def match(self, _: str) -> bool:
        return threading.get_ident() == self._ident

    def close(self) -> None:
        self._ident = None


@contextmanager
def silent() -> Iterator[None]:
    """Nobody is warned of a pass that is not theirs, such as of one without gradients through a checkpoint.

    Not by `warnings.catch_warnings`: it is for all threads, and what has been shown once would be shown once more.
    """
    here, filters = ThisThread(), cast(list[Any], warnings.filters)
    ignore = ("ignore", here, Warning, None, 0)
    filters.insert(0, ignore)
    try:
        yield
    finally:
        here.close()  # for those who have copied the list
        with suppress(ValueError):
            filters.remove(ignore)


class NoCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before a collective, which would wait for ever for processes that do not make this pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.lstrip("_").startswith("c10d"):
            raise InvalidArgument(f"its forward communicates between processes ({func.name()}), an extra pass must not")
        return func(*args, **(kwargs or {}))
