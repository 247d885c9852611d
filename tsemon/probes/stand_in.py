"""A stand-in for a model: the same computation, with a state of its own, so that a pass through it leaves no trace.

Nothing is changed in the model itself, not for a moment: another thread may be saving or evaluating it.
"""

from __future__ import annotations

import copy
import enum
import functools
import random
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tsemon.errors import InvalidArgument
from tsemon.probes.hooks import ForwardWithin

MAX_OBJECTS = 200_000
"""Copied for one stand-in at the most: what holds more is no model, but something that holds the whole program."""

# Nobody can change these, or they belong to all.
SHARED = (
    *(bool, int, float, complex, str, bytes, slice, range, type(None), type(...), type, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.Size, torch.finfo, torch.iinfo),
    *(types.BuiltinFunctionType, types.ModuleType, weakref.ref, property),
)
SHARED_PACKAGES = (
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "logging",
    "threading",
    "_thread",
    "torch.distributed",
)
"""What models refer to and do not compute with: a trainer, a logger, a lock, a group of processes."""
HOOKS = {"_forward_hooks", "_forward_pre_hooks"}
OTHER_HOOKS = {
    *("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
}
OWN_WAYS = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__slots__")
"""Of a class that says itself how it is copied, or keeps more than attributes."""
LEFT_OUT = {"_compiled_call_impl"}


def stand_in(model: nn.Module, scale: float = 1.0) -> dict[nn.Module, nn.Module]:
    """A stand-in for each module of the model, in eval mode, with parameters times `scale`.

    Parameters are copied when they are used; everything else that a forward could change is copied now. Of hooks only
    those that torch itself has set are kept, which make weights. Raises InvalidArgument for what cannot be copied.
    """
    copier = _Copier(scale)
    copier.copied(model)
    return copier.modules


class _Copier:
    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._copies: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no two things have the same id
        self.modules: dict[nn.Module, nn.Module] = {}

    def copied(self, value: Any) -> Any:
        if isinstance(value, SHARED) or type(value).__module__.split(".")[0] in SHARED_PACKAGES:
            return value
        if id(value) not in self._copies:
            if len(self._alive) > MAX_OBJECTS:
                raise InvalidArgument(f"it refers to more than {MAX_OBJECTS} objects, so no stand-in is made of it")
            self._alive.append(value)
            self._copies[id(value)] = self._copy(value)
        return self._copies[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            return _tensor(value, self._scale)
        if isinstance(value, types.FunctionType):
            return value
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copied(value.__self__))
        if isinstance(value, functools.partial):
            args, keywords = self.copied(list(value.args)), self.copied(dict(value.keywords))
            return functools.partial(self.copied(value.func), *args, **keywords)
        if isinstance(value, dict) and type(value) in (dict, OrderedDict, defaultdict, Counter):
            return self._dict(value)
        if type(value) in (list, set, deque):
            return self._collection(value)
        if isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_fields")):
            items = [self.copied(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if type(value) is frozenset:
            return value
        return self._object(value)

    def _module(self, module: nn.Module) -> nn.Module:
        if type(module).__name__ == "OptimizedModule":  # what torch.compile returned runs what it was made of
            made = self.copied(module._orig_mod)
            assert isinstance(made, nn.Module)
            self.modules[module] = made
            return made
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidArgument("parts of it are TorchScript, which has no stand-in")
        made = type(module).__new__(type(module))
        self._copies[id(module)] = self.modules[module] = made
        own = vars(made)
        for name, value in vars(module).items():
            if name == "_parameters":
                own[name] = Copies(value, self._scale)
            elif name in HOOKS:
                own[name] = OrderedDict((key, hook) for key, hook in value.items() if _is_of_torch(hook))
            elif name in OTHER_HOOKS:
                own[name] = OrderedDict()
            elif name == "training":
                own[name] = False
            elif name == "forward":
                self._forward(module, made, value)
            elif name not in LEFT_OUT:
                own[name] = self.copied(value)
        return made

    def _forward(self, module: nn.Module, made: nn.Module, value: Any) -> None:
        """Somebody has put a forward of its own on this very module."""
        if isinstance(value, ForwardWithin):
            value = value.own
        value = getattr(value, "_torchdynamo_orig_callable", value)  # a compiled one
        if value is None:
            return
        if isinstance(value, types.FunctionType) and value.__closure__:
            raise InvalidArgument(f"the forward of {type(module).__name__} is a closure, which has no stand-in")
        vars(made)["forward"] = self.copied(value)

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        made = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        self._copies[id(value)] = made
        for key, item in value.items():
            made[self.copied(key)] = self.copied(item)
        return made

    def _collection(self, value: Any) -> Any:
        made = deque(maxlen=value.maxlen) if isinstance(value, deque) else type(value)()
        self._copies[id(value)] = made
        add = made.add if isinstance(made, set) else made.append
        for item in value:
            add(self.copied(item))
        return made

    def _object(self, value: Any) -> Any:
        """An object by its attributes, where it is as plain as that; others know themselves how they are copied."""
        kind = type(value)
        if isinstance(value, torch.Generator):
            generator = torch.Generator(device=value.device)
            generator.set_state(value.get_state())
            return generator
        if isinstance(value, random.Random):
            made = kind()
            made.setstate(value.getstate())
            return made
        has_own_way = any(name in vars(base) for base in kind.__mro__[:-1] for name in OWN_WAYS)
        if hasattr(value, "__dict__") and not has_own_way:
            made = object.__new__(kind)
            self._copies[id(value)] = made
            for name, item in vars(value).items():
                vars(made)[name] = self.copied(item)
            return made
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise InvalidArgument(f"it holds a {kind.__name__} that cannot be copied: {error}") from error


class Copies(dict[str, nn.Parameter | None]):
    """A module's parameters, each handed out as a copy, times `scale`: only those in use take memory."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], scale: float) -> None:
        super().__init__(parameters)
        self._scale = scale

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        return None if parameter is None else _tensor(parameter, self._scale)

    def get(self, name: str, default: Any = None) -> Any:
        return default if super().get(name) is None else self[name]

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return ((name, self[name]) for name in self)


def _tensor(value: Tensor, scale: float) -> Any:
    """A copy of a buffer or of any tensor that a module holds; of a parameter, times `scale`."""
    if not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if is_lazy(value):
        raise InvalidArgument("it has parameters that are not initialised yet")
    is_scaled = scale != 1 and (value.is_floating_point() or value.is_complex())
    if type(value) is not nn.Parameter and is_scaled:
        raise InvalidArgument(f"parameters of class {type(value).__name__} cannot be scaled")
    copied = value.detach() * scale if is_scaled else value.detach().clone()
    return nn.Parameter(copied, requires_grad=value.requires_grad) if type(value) is nn.Parameter else copied


def _is_of_torch(hook: Any) -> bool:
    kind = hook if isinstance(hook, types.FunctionType | type) else type(getattr(hook, "__self__", hook))
    return kind.__module__.split(".")[0] == "torch"
