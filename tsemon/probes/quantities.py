"""Quantities of the user's own: functions that get the tensors of a block, and that can do the training no harm.

Axes: L entries (blocks, or blocks and the first one's input), N elements of the result of a function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tsemon.errors import InvalidArgument
from tsemon.measures.linear import widened
from tsemon.measures.sums import NOTHING, Merge, Partial, Partials
from tsemon.probes.discovery import Block
from tsemon.probes.reading import OnHost, Reading, by_entry
from tsemon.quantity import Quantity, Where
from tsemon.stacks import Stacks

MAX_ELEMENTS = 1024
"""Elements of an array that `Quantity.finish` gets."""
VALUE, COUNT, FAILED = "#value", "#count", "#failed"
"""Endings that the name of no metric has."""
OF_PARTS = ("gradients", "parameters")
"""Tensors that come in parts: of several optimizers, and of shards that count differently."""
OVER: Mapping[Merge, Callable[..., Tensor]] = {"sum": Tensor.sum, "max": Tensor.amax, "min": Tensor.amin}


class Quantities:
    """Some quantities, and the results of their functions in the current step."""

    def __init__(
        self,
        quantities: Sequence[Quantity] = (),
        blocks: Sequence[Block] = (),
        stacks: Stacks | None = None,
        on_fault: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._quantities = {quantity.name: quantity for quantity in quantities}
        self._blocks = {block.number: block.name for block in blocks}
        self._outputs = {block.entry: block.name for block in blocks}
        self._stacks = Stacks.of(len(blocks)) if stacks is None else stacks
        """The stacks of the whole model; `blocks` may be one pipeline stage."""
        inputs = {span.start for span in self._stacks.spans(self._stacks.num_states)}
        self._inputs = inputs & {block.entry - 1 for block in blocks}
        self._on_fault = on_fault
        self._found: dict[str, dict[int, Partials]] = {}
        self._failed: dict[str, dict[int, str]] = {}
        self._undefined: dict[str, str] = {}
        """Reasons for NaN in the newest frame. Only the host knows them, so they come a sampled step late."""
        self.wanted: frozenset[str] = frozenset()
        """Which of them this step should give."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._quantities)

    def of(self, *where: Where) -> bool:
        """Whether this step should give a quantity of these tensors."""
        return any(self._quantities[name].of in where for name in self.wanted)

    def forget(self) -> None:
        self._found, self._failed = {}, {}

    def see_state(self, entry: int, block: Block, x_BTD: Tensor, valid_BT: Tensor | None) -> None:
        """A hidden state of the pass: the block's output, or its input."""
        is_output = entry == block.entry
        if not is_output and entry not in self._inputs:
            return  # the output of the pipeline's stage before
        arguments = with_padding(x_BTD, valid_BT)
        for quantity in self._wanted_of("output"):
            if quantity.axis == "activation":
                self._see(quantity, entry, *arguments)
            elif is_output:
                self._see(quantity, block.number, *arguments)

    def drop(self, block: Block) -> None:
        """Forget the values of the block and of its input."""
        for name, of_entries in self._found.items():
            is_of_states = self._quantities[name].axis == "activation"
            for entry in (block.entry - 1, block.entry) if is_of_states else (block.number,):
                of_entries.pop(entry, None)

    def see(self, where: Where, block: int, *arguments: Any, share: float = 1.0) -> None:
        """Tensors of one block. If they come in several parts, `share` is the weight of this part in the merge."""
        for quantity in self._wanted_of(where):
            self._see(quantity, block, *arguments, share=share)

    def collect(self) -> Partials:
        found: Partials = {}
        for name in self.wanted:
            is_of_states = self._quantities[name].axis == "activation"
            entries = range(self._stacks.num_states if is_of_states else self._stacks.num_blocks)
            found |= by_entry(self._found.get(name, {}), entries)
            # What failed in one process is the value of none: the others have only a part of it.
            flags = [float(entry in self._failed.get(name, ())) for entry in entries]
            found[name + FAILED] = Partial(torch.tensor(flags), "max")
        return found

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        reading = Reading()
        for name in sorted(self.wanted):
            if name + VALUE in sums:
                quantity = self._quantities[name]
                value, seen = sums[name + VALUE], frozenset(self._found.get(name, ()))
                has_failed_L = sums[name + FAILED].to(value.device, non_blocking=True) > 0
                count_L = torch.where(has_failed_L, torch.nan, sums[name + COUNT])
                if quantity.axis == "run":
                    value, count_L = OVER[_merge(quantity)](value, 0)[None], count_L.sum()[None]
                    seen = frozenset([0] if seen else [])
                count = count_L.view(-1, *[1] * (value.ndim - 1))
                value = torch.where(count > 0, value / count if quantity.merge == "mean" else value, torch.nan)
                metric = OnHost(value, functools.partial(self._on_host, quantity, seen), is_merged=True)
                (reading.scalars if quantity.axis == "run" else reading.layers)[name] = metric
        return reading

    def why_missing(self, why_unseen: Callable[[Where], str]) -> dict[str, str]:
        """Quantity to the reason why a value of it is missing."""
        reasons = {}
        for name in self.wanted:
            quantity = self._quantities[name]
            num_expected = len(self._blocks) + len(self._inputs) * (quantity.axis == "activation")
            if name in self._failed:
                reasons[name] = next(iter(self._failed[name].values()))
            elif missed := num_expected - len(self._found.get(name, ())):
                reasons[name] = f"{missed} of {num_expected} were not seen: {why_unseen(quantity.of)}"
            elif name in self._undefined:
                reasons[name] = self._undefined[name]
        return reasons

    def _wanted_of(self, where: Where) -> list[Quantity]:
        return [
            quantity for quantity in self._quantities.values() if quantity.of == where and quantity.name in self.wanted
        ]

    def _see(self, quantity: Quantity, entry: int, *arguments: Any, share: float = 1.0) -> None:
        of_entries = self._found.setdefault(quantity.name, {})
        if entry in self._failed.get(quantity.name, ()):
            return
        if entry in of_entries and quantity.of not in OF_PARTS:  # what runs again in the same pass is recomputed
            return
        try:
            with Harmless():
                returned = quantity.function(*arguments)
            of_entries[entry] = _added(of_entries.get(entry), _partials(quantity, returned, arguments, share))
            shapes = [tuple(found[quantity.name + VALUE].value.shape) for found in of_entries.values()]
            if shapes[0] != shapes[-1]:
                raise InvalidArgument(f"it must always return one shape, got {shapes[-1]} after {shapes[0]}")
        except Exception as error:
            of_entries.pop(entry, None)
            self._fail(quantity, entry, error)

    def _fail(self, quantity: Quantity, entry: int, error: Exception) -> None:
        """Counted once a step, however many blocks it concerns."""
        of_entries = self._failed.setdefault(quantity.name, {})
        names = self._outputs if quantity.axis == "activation" else self._blocks
        where = names.get(entry, "the first block's input")
        of_entries[entry] = f"its function failed at {where}: {type(error).__name__}: {error}"
        if len(of_entries) == 1:
            self._report(quantity, of_entries[entry], error)

    def _report(self, quantity: Quantity, text: str, error: Exception) -> None:
        fault = InvalidArgument(f"Quantity({quantity.name!r}): {text}")
        fault.__cause__ = error
        self._on_fault(fault)

    def _on_host(self, quantity: Quantity, seen: frozenset[int], value_L: Tensor) -> Tensor:
        """One number per entry. Runs on the exporter's thread."""
        why, numbers = "its function returned NaN", list[float]()
        for value in value_L:
            try:
                # What was not seen, or failed, is NaN throughout, and is nothing to finish.
                finish = Tensor.amin if value.isnan().all() else quantity.finish or Tensor.amin
                numbers.append(float(finish(value)))
            except Exception as error:
                numbers.append(math.nan)
                why = f"its finish raised {type(error).__name__}: {error}"
                self._report(quantity, why, error)
        num_undefined = sum(math.isnan(number) for entry, number in enumerate(numbers) if entry in seen)
        text = f"{why} in {num_undefined} of {len(seen)} entries of the newest frame"
        others = {name: why for name, why in self._undefined.items() if name != quantity.name}
        self._undefined = others | ({quantity.name: text} if num_undefined else {})
        found_L = torch.tensor(numbers)
        return found_L[0] if quantity.axis == "run" else found_L


def with_padding(x: Tensor, valid_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tensor (B, ..., T, width) in float32 or wider with zeros at padding, and which tokens are no padding."""
    x = widened(x)
    if valid_BT is None:
        return x, torch.ones(x.shape[0], x.shape[-2], dtype=torch.bool, device=x.device)
    valid_BT = valid_BT.bool()
    batch, tokens = valid_BT.shape
    return torch.where(valid_BT.view(batch, *[1] * (x.ndim - 3), tokens, 1), x, 0.0), valid_BT


def _partials(quantity: Quantity, returned: Any, arguments: Sequence[Any], share: float) -> Partials:
    """The result of a function, as a share that merges."""
    if isinstance(returned, int | float):
        like = next(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))
        returned = like.new_full((), returned, dtype=torch.float32)
    if not isinstance(returned, Tensor) or returned.is_complex():
        kind = f"a tensor of {returned.dtype}" if isinstance(returned, Tensor) else type(returned).__name__
        raise InvalidArgument(f"it must return a tensor of real numbers, or a number, got {kind}")
    value, merge = widened(returned), _merge(quantity)
    if not 1 <= value.numel() <= (MAX_ELEMENTS if quantity.finish else math.inf):
        most = f" to {MAX_ELEMENTS} elements" if quantity.finish else " or more elements"
        raise InvalidArgument(f"it must return 1{most}, got shape {tuple(value.shape)}")
    count = value.new_ones(())
    if quantity.finish is None:
        is_known = ~value.isnan()
        count, value = is_known.sum().to(value.dtype), OVER[merge](torch.where(is_known, value, NOTHING[merge]))
    value = value * share if merge == "sum" else value
    return {quantity.name + VALUE: Partial(value, merge), quantity.name + COUNT: Partial(count * share)}


def _merge(quantity: Quantity) -> Merge:
    return "sum" if quantity.merge == "mean" else quantity.merge


def _added(one: Partials | None, other: Partials) -> Partials:
    if one is None:
        return other
    return {
        name: Partial(OVER[merge](torch.stack([one[name].value, value]), 0), merge)
        for name, (value, merge) in other.items()
    }


class Harmless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises InvalidArgument before an operation that would change the training, or make it wait for the device."""

    def __init__(self, *, may_wait: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._may_wait = may_wait
        self._own: set[int] = set()
        """Memory that was allocated within."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for place, name in _written(func):
            written = args[place] if place < len(args) else kwargs.get(name)
            if any(_memory(leaf) not in self._own for leaf in tree_leaves(written) if isinstance(leaf, Tensor)):
                raise InvalidArgument(
                    f"it must not write into a tensor that it has not made ({func}); write into a copy"
                )
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            raise InvalidArgument(
                f"it must not draw from the global random state ({func}); use a torch.Generator of its own"
            )
        if not self._may_wait and (_waits(func, args) or _leaves_device(func, given, kwargs)):
            raise InvalidArgument(
                f"it must not wait for the device ({func}); compute with tensors instead, as torch.where does"
            )
        result = func(*args, **kwargs)
        known = set(map(_memory, given))
        self._own |= {_memory(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)} - known
        return result


@functools.lru_cache(maxsize=1024)
def _written(func: Any) -> list[tuple[int, str]]:
    """Return the index and the name of each argument that the operation changes."""
    arguments = enumerate(func._schema.arguments)
    return [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _waits(func: Any, args: Sequence[Any]) -> bool:
    """Return True if the host must know the size or the value of the result. For x[i], only a mask requires this."""
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _leaves_device(func: Any, given: Collection[Tensor], kwargs: Mapping[str, Any]) -> bool:
    to, comes_from = kwargs.get("device"), {tensor.device.type for tensor in given} - {"cpu"}
    if func is torch.ops.aten.copy_.default:
        to = next(iter(given)).device
    return bool(comes_from) and to is not None and torch.device(to).type == "cpu"


def _memory(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # of a sparse tensor
        return id(tensor)


NONE = Quantities()
