"""A few sequences that are kept, so that the model can be run on them once more."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument

MAX_SEQUENCES = 4

ProbeBatch = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""A model's input: its only argument, its positional arguments, or its keyword arguments."""

PARALLEL = {"DistributedDataParallel": "module", "DataParallel": "module"}
WRAPPERS = PARALLEL | {"OptimizedModule": "_orig_mod"}
"""Modules that only run another one, by class, and the name that they have for it. Parallel ones change its inputs."""

# They are passed on as they are: nobody can change them, or they are no data.
CONSTANTS = (
    *(bool, int, float, complex, str, bytes, slice, range, type(None), type, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, types.FunctionType, types.BuiltinFunctionType, nn.Module),
)


class Inputs(NamedTuple):
    """What one call of a module was given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with `change` applied to every tensor, and containers of their own."""
        return Inputs(_map(self.args, change), _map(self.kwargs, change))

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All of them, however they are nested."""
        return _tensors([*self.args, *self.kwargs.values()])

    @property
    def batch_size(self) -> int | None:
        """The first axis of the first tensor that has several."""
        return next((tensor.shape[0] for tensor in self.tensors if tensor.ndim > 1), None)


class HeldBatch:
    """At most `MAX_SEQUENCES` sequences of a training pass, or what the user gave instead.

    can_cut: False where the first axis of the model's inputs may be tokens.
    """

    def __init__(self, model: nn.Module, given: ProbeBatch | None = None, *, can_cut: bool = True) -> None:
        self.module = unwrapped(model)
        """The module that the inputs are for: the outermost that was called."""
        self.is_given = given is not None
        self.why_not: str | None = None
        """What the inputs had that cannot be kept."""
        self._can_cut = can_cut
        self._is_of_training = self._has_run = self.is_given
        # What to try, the first choice first: the whole batch stands behind the cut one until that has run.
        self._candidates = [] if given is None else [_as_inputs(given).map(_own)]

    @property
    def inputs(self) -> Inputs | None:
        """What to run the module on. A forward may spoil its inputs, so it gets copies."""
        return self._candidates[0] if self._candidates else None

    @property
    def is_final(self) -> bool:
        """Whether no other batch would be better: one in eval mode may be of an evaluation."""
        return bool(self._candidates) and self._is_of_training

    def __str__(self) -> str:
        size = self.inputs.batch_size if self.inputs is not None and self._can_cut else None
        return "a held batch" if size is None else f"{size} held sequences"

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the beginning of a module's inputs, unless what is held is as good: it stays the same for the whole run."""
        if type(module).__name__ in PARALLEL or self.is_final or (self._candidates and not module.training):
            return
        self.module, self._is_of_training, self._has_run = unwrapped(module), unwrapped(module).training, False
        parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
        self._candidates = []
        try:
            whole = Inputs(args, kwargs).map(lambda tensor: _widened(_own(tensor), parameter))
            size = whole.batch_size
            can_cut = self._can_cut and size is not None and size > MAX_SEQUENCES
            cut = [whole.map(lambda tensor: _first(tensor, size))] if can_cut and size is not None else []
        except InvalidArgument as error:
            self.why_not = str(error)
        except Exception as error:  # containers and tensors of other kinds may raise whatever they like
            self.why_not = f"the model's inputs cannot be copied: {type(error).__name__}: {error}"
        else:
            self._candidates = [*cut, whole]

    def accept(self) -> None:
        """The first choice has run; let go of the other."""
        self._has_run = True
        del self._candidates[1:]

    def reject(self) -> bool:
        """The first choice does not run. Returns whether there is another; without one, the next batch is taken."""
        if not self._has_run:
            del self._candidates[:1]
        return bool(self._candidates) and not self._has_run


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that the wrappers around it run."""
    while (name := WRAPPERS.get(type(module).__name__)) is not None:
        module = module.get_submodule(name)
    return module


def check_probe_batch(given: Any) -> None:
    """Raises InvalidArgument for what cannot be a model's input."""
    if not isinstance(given, Tensor | tuple | Mapping):
        raise InvalidArgument(
            "probe_batch is a tensor, a tuple of positional arguments, or a dict of keyword arguments of the model, got "
            f"{type(given).__name__}"
        )
    _as_inputs(given).map(lambda tensor: tensor)


def _as_inputs(given: ProbeBatch) -> Inputs:
    if isinstance(given, Mapping):
        return Inputs((), dict(given))
    return Inputs(given if isinstance(given, tuple) else (given,), {})


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _first(tensor: Tensor, size: int) -> Tensor:
    return tensor[:MAX_SEQUENCES].clone() if tensor.ndim and tensor.shape[0] == size else tensor


def _widened(tensor: Tensor, parameter: Tensor | None) -> Tensor:
    """Half-precision inputs of a float32 model: autocast has mixed them, which is off in the extra pass."""
    is_narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    return (
        tensor.to(parameter.dtype) if is_narrow and parameter is not None and parameter.element_size() > 2 else tensor
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, CONSTANTS):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, dict | UserDict):  # other mappings' copies may share what they hold with the user's own
        copied: Any = copy.copy(value)
        for key, item in value.items():
            copied[key] = _map(item, change)
        return copied
    if dataclasses.is_dataclass(value):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, _map(getattr(value, field.name), change))
        return copied
    raise InvalidArgument(
        f"a {type(value).__name__} among the model's inputs is nothing that tsemon can copy; give tensors, and tuples, "
        "lists and dicts of them: attach(..., probe_batch=...)"
    )
