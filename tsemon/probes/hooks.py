"""Hooks that are guests: they return nothing, raise nothing, leave nothing behind, and know what they cost."""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

Context = Callable[[], AbstractContextManager[object]]
Span = tuple[torch.cuda.Event, torch.cuda.Event]

DEVICES = ("cpu", "cuda")
"""Types of devices whose autocast tsemon turns off and back on."""
NONE_ENABLED = (False, False)
MAX_SPANS = 10_000
"""More hooks than that run in no step. It bounds what a run without samples could pile up."""


class ThreadState:
    """Whether gradients and autocast are on in this thread, to be put back at the very end.

    A context manager is no protection from an interrupt: between what it switches and its entry, or in its exit, nothing
    switches back.
    """

    def __init__(self) -> None:
        self.is_grad_enabled = torch.is_grad_enabled()
        self._has_autocast = torch._C._is_any_autocast_enabled()
        self._autocast = tuple(map(torch.is_autocast_enabled, DEVICES)) if self._has_autocast else NONE_ENABLED
        self._depth_of_autocast = depth_of_autocast()

    @property
    def is_plain(self) -> bool:
        """Whether neither autocast nor a mode of torch.utils._python_dispatch is on."""
        has_modes = torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
        return not (has_modes or self._has_autocast)

    @property
    def is_unseen(self) -> bool:
        """Whether no code of the user's sees or changes an operation here: `is_plain`, without a mode of torch.overrides."""
        return self.is_plain and not torch._C._is_torch_function_mode_enabled()

    def put_back(self) -> None:
        if torch.is_grad_enabled() != self.is_grad_enabled:
            torch._C._set_grad_enabled(self.is_grad_enabled)
        # While it is not back at zero, autocast keeps the weights that it has cast, also when they have changed since.
        for _ in range(depth_of_autocast() - self._depth_of_autocast):
            torch.autocast_decrement_nesting()
        if not self._has_autocast and not torch._C._is_any_autocast_enabled():
            return
        for device, was_enabled in zip(DEVICES, self._autocast, strict=True):
            if torch.is_autocast_enabled(device) != was_enabled:
                torch.set_autocast_enabled(device, was_enabled)


def depth_of_autocast() -> int:
    """How many autocast contexts this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class Guard:
    """Runs what hooks do: contained, timed, and out of sight of everything that the user's own code has switched on."""

    def __init__(self, on_fault: Callable[[Exception], None], device: torch.device | None = None) -> None:
        self.on_fault = on_fault
        self._is_on_cuda = device is not None and device.type == "cuda"
        self._depth = 0
        self._spans: list[Span] = []
        self.cost_s = 0.0
        """Seconds spent inside hooks so far, on the thread that trains."""
        self.has_met_transform = False
        """Whether a hook was left out because the model ran under a transform of torch.func."""
        self.is_grad_enabled = True
        """Whether the code around the hook that runs, or ran last, records gradients."""

    def run(self, hook: Callable[..., None], *args: Any) -> None:
        """Call `hook` out of sight, count its time, and contain whatever goes wrong in it."""
        start, span = time.perf_counter(), self._begin()
        self._depth += 1
        try:
            self.contain(hook, *args)
        finally:
            self._end(start, span)

    def contain(self, hook: Callable[..., None], *args: Any) -> None:
        """The same without counting: while ranks wait for each other, it is not tsemon that takes the time."""
        state = ThreadState()
        self.is_grad_enabled = state.is_grad_enabled
        try:
            # It is put back with the rest. A context manager would cost more than most hooks, and many run in a step.
            torch._C._set_grad_enabled(False)
            with torch._C.DisableTorchFunction():
                if state.is_plain:
                    hook(*args)
                    return
                # The user's modes must not see our operations: selective checkpointing would keep our tensors for the
                # model's, a mode that simulates quantization would draw from the random state.
                with full_precision(), _disable_current_modes():
                    hook(*args)
        except Exception as error:
            self.on_fault(error)
        finally:
            state.put_back()

    def run_model(self, function: Callable[..., None], *args: Any) -> None:
        """Call what calls the model, counted and contained as well; a model may need modes that a hook must not meet."""
        state = ThreadState()
        start, span = time.perf_counter(), self._begin()
        self._depth += 1
        try:
            function(*args)
        except Exception as error:
            self.on_fault(error)
        finally:
            self._end(start, span)
            state.put_back()

    def take_spans(self) -> list[Span]:
        """Where on the device's own clock hooks ran since the last call: its time passes after the launch."""
        spans, self._spans = self._spans, []
        return spans

    def _end(self, start: float, span: Span | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.cost_s += time.perf_counter() - start
        if span is not None:
            span[1].record()

    def _begin(self) -> Span | None:
        if not self._is_on_cuda or self._depth or len(self._spans) >= MAX_SPANS:
            return None
        span = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        span[0].record()
        self._spans.append(span)
        return span


class Hooks:
    """A set of hooks that come and go together."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.generation = 0
        """Counts the removals. An interrupt may leave a hook behind; it does nothing in a later generation."""
        self.stand_ins: Mapping[nn.Module, nn.Module] | None = None
        """What runs in the place of each module, where that is not the module itself. It is hooked in its place."""
        self.thread: int | None = None
        """The thread on which the pass runs that they are for; None: any. Another may evaluate the model meanwhile."""
        self._handles: list[Any] = []
        self._within: list[tuple[nn.Module, Context]] = []
        self._called: list[tuple[nn.Module, CalledCompiled]] = []

    @property
    def are_concerned(self) -> bool:
        """Whether what runs now is what they are for."""
        if self.thread not in (None, threading.get_ident()):
            return False
        self.guard.has_met_transform |= is_transformed()
        return not is_transformed()

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call hook(module, args, kwargs) before the module's forward."""
        if (runs := self._that_runs(module)) is not None:
            guarded = ModuleHook(self, hook, module, runs, "_forward_pre_hooks")
            guarded.id = runs.register_forward_pre_hook(guarded, with_kwargs=True).id
            self._handles.append(guarded)

    def before_compiled(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """The same for a module that was compiled in place: its own hooks are inside the graph, or left out of it."""
        called = CalledCompiled(module, Guarded(self, hook))
        module._compiled_call_impl = called
        self._called.append((module, called))

    def after(self, module: nn.Module, hook: Callable[..., None], *, first: bool = False) -> None:
        """Call hook(module, args, kwargs, output) after the module's forward, unless that raised.

        `first`: before the hooks that the module has already.
        """
        if (runs := self._that_runs(module)) is not None:
            guarded = ModuleHook(self, hook, module, runs, "_forward_hooks")
            guarded.id = runs.register_forward_hook(guarded, with_kwargs=True, prepend=first).id
            self._handles.append(guarded)

    def within(self, module: nn.Module, context: Context) -> None:
        """Run the module's forward within `context()`.

        Not two hooks that enter and leave it: an interrupt would go past the second, and a second thread between them.
        """
        if (runs := self._that_runs(module)) is not None:
            forward = vars(runs).get("forward")
            if not isinstance(forward, ForwardWithin):
                forward = runs.forward = ForwardWithin(runs)
            forward.contexts.append(context)
            self._within.append((runs, context))

    def around_step(
        self, optimizer: torch.optim.Optimizer, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        """Call before(optimizer, args, kwargs) and after(optimizer, args, kwargs) around the optimizer's step."""
        self._handles.append(optimizer.register_step_pre_hook(Guarded(self, before)))
        self._handles.append(optimizer.register_step_post_hook(Guarded(self, after)))

    def after_any_step(self, hook: Callable[..., None]) -> None:
        """Call hook(optimizer, args, kwargs) after the step of every optimizer in this process."""
        self._handles.append(register_optimizer_step_post_hook(Guarded(self, hook)))

    def accumulated(self, parameters: Iterable[nn.Parameter], hook: Callable[[nn.Parameter], None]) -> None:
        """Call hook(parameter) when a backward pass has added to a gradient, before all other hooks of this kind.

        The hook runs unguarded, because there is one per parameter: it must be fast and must not raise.
        """
        self._handles.append(accumulated := Accumulated(self, hook))
        for parameter in parameters:
            accumulated.listen(parameter)

    def around_call(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Call before(*args) and after(*args) around every call of the function `owner.name` of a module or class."""
        if (around := called_around(owner, name)) is not None:
            for hooks, hook in ((around.before, before), (around.after, after)):
                if hook is not None:
                    hooks.append(guarded := Guarded(self, hook))
                    self._handles.append(CallHandle(around, hooks, guarded))

    def _that_runs(self, module: nn.Module) -> nn.Module | None:
        """None for a wrapper around what has a stand-in: it does not run."""
        return module if self.stand_ins is None else self.stand_ins.get(module)

    def remove(self) -> None:
        """Take all of them out again. An interrupt in the middle leaves the rest to the next call."""
        self.generation += 1
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        while self._within:
            module, context = self._within[-1]
            if isinstance(forward := vars(module).get("forward"), ForwardWithin):
                forward.contexts = [other for other in forward.contexts if other is not context]
                if not forward.contexts:
                    forward.put_back(module)
            self._within.pop()
        while self._called:
            module, called = self._called[-1]
            called.take_out(module)
            self._called.pop()


class CalledCompiled:
    """Stands in for the compiled call of a module, and tells a hook of it. It is never traced, copied or pickled."""

    def __init__(self, module: nn.Module, hook: Guarded) -> None:
        self._module = module
        self._compiled: Any = module._compiled_call_impl
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._hook(self._module, args, kwargs)
        return self._compiled(*args, **kwargs)

    def take_out(self, module: nn.Module) -> None:
        """Let the module make its compiled call itself again, or another monitor's stand-in that was there before."""
        if module._compiled_call_impl is self:
            module._compiled_call_impl = self._compiled
            return
        outer = module._compiled_call_impl
        while isinstance(outer, CalledCompiled):
            if outer._compiled is self:
                outer._compiled = self._compiled
            outer = outer._compiled


class Accumulated:
    """The hook of many parameters, and its own handle."""

    def __init__(self, hooks: Hooks, hook: Callable[[nn.Parameter], None]) -> None:
        self._hooks, self._generation = hooks, hooks.generation
        self._hook = hook
        self._ids: dict[Any, int] = {}

    def listen(self, parameter: Any) -> None:
        self._ids[parameter] = parameter.register_post_accumulate_grad_hook(self).id
        parameter._post_accumulate_grad_hooks.move_to_end(self._ids[parameter], last=False)

    def __call__(self, parameter: nn.Parameter) -> None:
        if not torch.compiler.is_compiling() and self._generation == self._hooks.generation:
            self._hook(parameter)

    def remove(self) -> None:
        for parameter, own in self._ids.items():
            hooks = parameter._post_accumulate_grad_hooks or {}
            hooks.pop(own, None)
            if not hooks:  # an empty dict would still be looked at in every backward pass
                parameter._post_accumulate_grad_hooks = None


class CalledAround:
    """Replaces a function of a module or class while one or several monitors have hooks around its calls."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self.owner, self.name, self.function = owner, name, function
        self.before: list[Callable[..., None]] = []
        self.after: list[Callable[..., None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        for hook in tuple(self.before):
            hook(*args)
        result = self.function(*args, **kwargs)
        for hook in tuple(self.after):
            hook(*args)
        return result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)


def called_around(owner: Any, name: str) -> CalledAround | None:
    """Let hooks be called around the function `owner.name`, as long as there are any. None if there is no such function."""
    if not callable(function := vars(owner).get(name)):
        return None
    around = function if isinstance(function, CalledAround) else _called_around(owner, name, function)
    setattr(owner, name, around)
    return around


@functools.lru_cache(maxsize=64)  # compiled code that looks the function up must find the same object each time
def _called_around(owner: Any, name: str, function: Callable[..., Any]) -> CalledAround:
    return CalledAround(owner, name, function)


class CallHandle(NamedTuple):
    """Removes one hook around a call, and puts the function back with the last one."""

    around: CalledAround
    hooks: list[Callable[..., None]]
    hook: Callable[..., None]

    def remove(self) -> None:
        around = self.around
        if self.hook in self.hooks:
            self.hooks.remove(self.hook)
        if not (around.before or around.after) and vars(around.owner).get(around.name) is around:
            setattr(around.owner, around.name, around.function)


class ForwardWithin:
    """Stands in for a module's forward while one or several monitors want it to run within their contexts."""

    def __init__(self, module: nn.Module) -> None:
        self.contexts: list[Context] = []
        self._module = module
        self._forward = module.forward
        self.own = vars(module).get("forward")
        """A forward that somebody else has put on this very module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            return self._forward(*args, **kwargs)

    # An interrupt may leave it in the module, and what people do then is to save the model.

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        if self.own is not None:
            own: Callable[..., Any] = copy.deepcopy(self.own, memo)
            return own
        copied = memo[id(self._module)]
        return MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.own is not None:
            return functools.partial, (self.own,)
        return getattr, (self._module, "forward")  # where it is loaded, its class's

    def put_back(self, module: nn.Module) -> None:
        """Let the module run its own forward again."""
        del module.forward
        if self.own is not None:
            module.forward = self.own


class Guarded:
    """One hook. If a hooked model is copied or pickled, the copy has a function that does nothing."""

    def __init__(self, hooks: Hooks, hook: Callable[..., None], module: nn.Module | None = None) -> None:
        """`module`: replaces the module that it is registered on, which may be a stand-in, in calls of the hook."""
        self._hooks = hooks
        self._generation = hooks.generation
        self._hook, self._module = hook, module

    def __call__(self, *args: Any) -> None:
        # Traced into a graph it would break that graph, or raise where the user has forbidden breaks.
        if (
            not torch.compiler.is_compiling()
            and self._generation == self._hooks.generation
            and self._hooks.are_concerned
        ):
            self._hooks.guard.run(self._hook, *(args if self._module is None else (self._module, *args[1:])))

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # From the standard library: whoever loads the model need not have tsemon.
        return getattr, (nullcontext(), "__exit__")


class ModuleHook(Guarded):
    """One hook of a module, and its own handle: PyTorch's handles keep Python's garbage collector busy."""

    id: int

    def __init__(self, hooks: Hooks, hook: Callable[..., None], module: nn.Module, runs: nn.Module, kind: str) -> None:
        """`runs`: the module that it is registered on; `kind`: the name of the dict that it is in there."""
        super().__init__(hooks, hook, module)
        self._runs, self._kind = runs, kind

    def remove(self) -> None:
        for name in (self._kind, f"{self._kind}_with_kwargs"):
            getattr(self._runs, name).pop(self.id, None)


# A PyTorch that has it elsewhere is taken to be in no transform.
_level_of_transforms = getattr(torch._C._functorch, "maybe_current_level", lambda: None)


def is_transformed() -> bool:
    """Whether vmap, grad or another transform of torch.func is under way: tensors are not what they seem, then."""
    return _level_of_transforms() is not None


@contextmanager
def full_precision() -> Iterator[None]:
    """Without autocast, which would turn a float32 product inside a hook into a bfloat16 one."""
    with ExitStack() as stack:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
