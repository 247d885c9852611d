"""Find the transformer blocks of a model, and in each its self-attention, without being told."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument, NoBlocksFound
from tsemon.probes.naming import (
    is_called,
    is_mixer,
    is_norm,
    is_self_attention,
    named_inside,
    names_attention,
    names_feed_forward,
)
from tsemon.probes.stacks import (
    CONTAINERS,
    Parts,
    Stack,
    Unit,
    find_stacks,
    frozen_twins,
    has_feed_forward,
    holds_norm,
    may_be_block,
    mixers,
)

NO_ATTENTION = (
    "no softmax self-attention was found there, or several that are summed. attach(attention=[...]) takes the names of the "
    "modules that compute it, which may be the blocks themselves"
)


@dataclass(frozen=True, slots=True)
class Block:
    """One transformer block, and the places in it where a probe can listen."""

    name: str
    """Where it is in the model; of a module that several layers share, also which of them: "layer (2 of 12)"."""
    number: int
    """Its number in the whole model, from 0; in a pipeline's later stage the first block is not 0."""
    entry: int
    """The entry of its output in arrays of activations. The entry before it is its input."""
    module: nn.Module
    attention: nn.Module | None
    deescalation: nn.Module | None
    """The step that removes the mean token at the block's end, where the block has one: its input is the state that
    the block computed, its output is what the next block sees."""
    tokens_first: bool
    """Whether hidden states are (tokens, batch, width), as in `torch.nn` modules with `batch_first=False`."""
    stack: int
    """Which of the model's stacks it belongs to: 0, and 1 for the decoder behind an encoder."""
    width: int | None
    """D, the size of the last axis of its hidden states; None if no layer shows it."""
    parts: Parts | None = None
    """Where to listen instead if `module` is a container that is never called."""


class Found(NamedTuple):
    blocks: list[Block]
    left_out: list[str]
    """A sentence on each stack that is not measured."""
    paths: list[tuple[str, int]]
    """Path of each stack in the model, and its number of blocks."""


def find_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module | str] | None = None,
    attention: Sequence[nn.Module | str] | None = None,
) -> list[Block]:
    """Return the model's blocks in depth order, see `discover`."""
    return discover(model, blocks, attention).blocks


def discover(
    model: nn.Module,
    blocks: Sequence[nn.Module | str] | None = None,
    attention: Sequence[nn.Module | str] | None = None,
) -> Found:
    """Find the model's blocks, stack by stack and in each in depth order.

    A stack is a ModuleList, Sequential or ModuleDict of modules that mix tokens. Several stacks (encoder and decoder, two
    towers) follow each other. A stack without trainable parameters beside one of the same structure that trains is a
    teacher or a reference model and is left out. A module that is applied several times (ALBERT, Universal Transformers)
    is as many blocks.

    Args:
        model: The model, or one stage of it.
        blocks: The blocks in depth order, as dotted names or modules, for models where they are not found. A block that
            is applied several times is listed once for each.
        attention: The self-attention of each block, in the same way.

    Raises:
        NoBlocksFound: The model has no stack, or one whose hidden states no module receives.
        InvalidArgument: A name is not in the model, a module in `blocks` is never called, or the lengths differ.
    """
    names = {id(module): name for name, module in model.named_modules()}
    stacks = find_stacks(model)
    if blocks is not None:
        found, numbers = _given(model, names, stacks, blocks)
        left_out = []
    else:
        twins = frozen_twins(model, stacks)
        left_out = [_why_left_out(stack, twins[stack.path]) for stack in stacks if stack.path in twins]
        stacks = [stack for stack in stacks if stack.path not in twins]
        left_out += [_why_undecided(stack) for stack in stacks if not _can_listen(stack)]
        stacks = [stack for stack in stacks if _can_listen(stack)]
        # A list may hold one module several times, once for each time that it is applied.
        numbered = [(unit, number) for number, stack in enumerate(stacks) for unit in stack.units]
        numbered = _applied(model, numbered)
        found, numbers = [unit for unit, _ in numbered], [number for _, number in numbered]
    if not found:
        raise NoBlocksFound(_describe_candidates(model, left_out))
    if attention is None:
        attentions = [self_attention(unit.module) for unit in found]
    elif len(attention) == len(found):
        attentions = [_resolve(model, names, entry) for entry in attention]
    else:
        raise InvalidArgument(
            f"attention= needs one module per block: there are {len(found)} blocks, got {len(attention)} attentions"
        )
    if len([*itertools.groupby(numbers)]) > len({*numbers}):
        numbers = [-1] * len(found)  # stacks that take turns are one depth, whatever lists their blocks are kept in
    sizes = Counter(numbers)
    order = {number: place for place, number in enumerate(sorted(sizes))}
    starts = {number: place for place, number in enumerate(sizes)}
    listed = zip(_names(found, names), found, attentions, numbers, strict=True)
    return Found(
        [
            Block(
                name=name,
                number=number,
                entry=number + starts[stack] + 1,
                module=unit.module,
                attention=attended,
                deescalation=_deescalation(unit.module),
                tokens_first=_has_tokens_first(unit.module),
                stack=order[stack],
                width=_hidden_width(unit.module, attended),
                parts=unit.parts,
            )
            for number, (name, unit, attended, stack) in enumerate(listed)
        ],
        left_out,
        [(stacks[number].path if number >= 0 else "", size) for number, size in sizes.items()],
    )


def path_to_gate(model: nn.Module, blocks: Sequence[Block]) -> list[nn.Module]:
    """From the model to the gate, the innermost module that holds all blocks and is itself called.

    A forward pass through the blocks begins at the gate; what it was given may be known to any module on the way.
    """
    parents = [block.name.split(".")[:-1] for block in blocks]
    common = list(itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False)))
    path = [parts[0] for parts in common]
    # Containers are as often looped over as called.
    while path and isinstance(model.get_submodule(".".join(path)), nn.ModuleList | nn.ModuleDict | nn.Sequential):
        path.pop()
    return [model.get_submodule(".".join(path[:end])) for end in range(len(path) + 1)]


def may_take_fast_path(module: nn.Module) -> bool:
    """Whether PyTorch may compute this module's attention by a fused kernel that hooks and modes would disable.

    It may where nothing trains: in eval mode, without parameters that want a gradient.
    """
    if module.training or not torch.backends.mha.get_fastpath_enabled():
        return False
    return not any(parameter.requires_grad for parameter in module.parameters())


def hides_from_hooks(block: Block) -> bool:
    """Whether a hook on the block, or in it, would send its layer another way than PyTorch's fused kernel."""
    return isinstance(block.module, nn.TransformerEncoderLayer) and may_take_fast_path(block.module)


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, GPT-2's Conv1D among them."""
    if isinstance(module, nn.Linear):
        return True
    return is_conv1d(module) and (weight := held(module, "weight")) is not None and weight.ndim == 2


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's, whose weight is (in, out). A parametrization makes a class of its own of it."""
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def held(module: nn.Module, name: str) -> Tensor | None:
    """The tensor that the module keeps by this name, or from which its parametrization makes one.

    To ask the module itself would run the parametrization, which may draw random numbers, count its calls, or be cached.
    """
    own = vars(module)
    if (parametrizations := own["_modules"].get("parametrizations")) is not None and name in parametrizations:
        own, name = vars(parametrizations[name]), "original"
    value = own["_parameters"].get(name, own.get(name))
    return value if isinstance(value, Tensor) else None


def widths(linear: nn.Module) -> tuple[int, int]:
    """What a linear layer takes and what it gives."""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    weight = held(linear, "weight")
    assert weight is not None  # as is_linear wants it
    return weight.shape[0], weight.shape[1]


def _hidden_width(block: nn.Module, attention: nn.Module | None) -> int | None:
    """Return the input width of the attention's first linear layer, or else of the first norm outside of mixers."""
    if attention is not None:
        linear = next((module for module in attention.modules() if is_linear(module)), None)
        if linear is not None:
            return widths(linear)[0]
    mixing = {module for mixer in mixers(block) for module in mixer.modules()}
    weights = (held(module, "weight") for module in block.modules() if is_norm(module) and module not in mixing)
    outside = (module for module in block.modules() if module not in mixing)
    convolved = (module.in_channels for module in outside if isinstance(module, nn.Conv1d))
    return next((weight.shape[-1] for weight in weights if weight is not None), next(convolved, None))


def innermost_attention(attention: nn.Module) -> nn.Module:
    """What computes attention in a module that is called so but may do more: add the residual, normalise the sum."""
    inner = self_attention(attention)
    if inner is None or not any(is_linear(module) for module in inner.children()):
        return attention
    return innermost_attention(inner)


def is_compiled(module: nn.Module) -> bool:
    """True if the module or a part of it is compiled: a change in it would compile it again."""
    return any(map(runs_compiled, walk(module)))


def walk(module: nn.Module) -> Iterable[nn.Module]:
    """The same as `module.modules()`, without the names that it makes: several times as fast."""
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        if (module := waiting.pop()) not in found:
            found[module] = None
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return found.keys()


def runs_compiled(module: nn.Module) -> bool:
    """Whether a call of this very module runs compiled."""
    own = vars(module)
    return not _eager.is_forced and bool(
        own.get("_compiled_call_impl")
        or "_orig_mod" in own.get("_modules", ())
        or hasattr(own.get("forward"), "_torchdynamo_orig_callable")
    )


def compiled_around(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """What `torch.compile` has made of these modules, wherever it is kept."""
    if (dynamo := sys.modules.get("torch._dynamo")) is None:
        return []
    wrappers = [found for found in gc.get_objects() if issubclass(type(found), dynamo.OptimizedModule)]
    inside = [(module, wrapper) for wrapper in wrappers for module in modules if wrapper._orig_mod is module]
    return [wrapper for _, wrapper in inside if wrapper not in modules]


def has_compiled() -> bool:
    """Whether torch.compile has compiled any code in this process: else nothing was called past its hooks."""
    utils = getattr(sys.modules.get("torch._dynamo"), "utils", None)
    return bool(getattr(utils, "counters", {}).get("frames"))


class _Eager(threading.local):
    is_forced = False


_eager = _Eager()


@contextmanager
def eagerly() -> Iterator[None]:
    """Run what is compiled as it was written, on all threads: nothing is compiled for it, and no graph changes."""
    _eager.is_forced = True
    try:
        # Without dynamo nothing is compiled; to import it takes seconds.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        _eager.is_forced = False


def self_attention(block: nn.Module) -> nn.Module | None:
    """The shallowest submodule that is a self-attention, by its class or by its place; None if several are summed."""
    candidates = [(path, module) for path, name, module in named_inside(block) if is_self_attention(name, module)]
    # A whole layer may be called after its attention (Zamba2's `AttentionDecoderLayer`).
    candidates = [(path, m) for path, m in candidates if not has_feed_forward(m) or self_attention(m) is None]
    if not candidates:
        return None
    path, module = min(candidates, key=lambda candidate: candidate[0].count("."))
    beside = [other for other, _ in candidates if _without_index(other) == _without_index(path)]
    return module if len(beside) == 1 or not is_called(block) else None


def _without_index(path: str) -> list[str]:
    return ["#" if part.isdecimal() else part for part in path.split(".")]


def _applied(model: nn.Module, layers: list[tuple[Unit, int]]) -> list[tuple[Unit, int]]:
    """Each layer as often as it is applied: ALBERT's config tells that it has fewer groups of layers than it applies."""
    for config in (getattr(module, "config", None) for module in model.modules()):
        num_applied, num_groups = getattr(config, "num_hidden_layers", 0), getattr(config, "num_hidden_groups", 0)
        if num_groups and num_applied % num_groups == 0 and len(layers) % num_groups == 0:
            size = len(layers) // num_groups
            groups = [layers[start : start + size] for start in range(0, len(layers), size)]
            return [layer for group in groups for _ in range(num_applied // num_groups) for layer in group]
    return layers


def _names(found: Sequence[Unit], names: dict[int, str]) -> Iterator[str]:
    """The module's name; of a module that is several layers, also which of them."""
    total, so_far = Counter(id(unit.module) for unit in found), Counter[int]()
    for unit in found:
        key = id(unit.module)
        so_far[key] += 1
        yield names.get(key, unit.name) + (f" ({so_far[key]} of {total[key]})" if total[key] > 1 else "")


def _given(
    model: nn.Module, names: dict[int, str], stacks: Sequence[Stack], blocks: Sequence[nn.Module | str]
) -> tuple[list[Unit], list[int]]:
    """The blocks that are given, and the number of the stack of each; -1 if it is not known."""
    known = {id(unit.module): (unit, number) for number, stack in enumerate(stacks) for unit in stack.units}
    modules = [_resolve(model, names, entry) for entry in blocks]
    for module in modules:
        if not is_called(module) and (id(module) not in known or not holds_norm(known[id(module)][0])):
            raise InvalidArgument(_why_never_called(module, names, stacks))
    units = [
        Unit(names[id(module)], module, None if is_called(module) else known[id(module)][0].parts) for module in modules
    ]
    numbers = [known[id(module)][1] if id(module) in known else -1 for module in modules]
    return units, [-1] * len(units) if -1 in numbers else numbers


def _why_never_called(module: nn.Module, names: dict[int, str], stacks: Sequence[Stack]) -> str:
    name = names[id(module)]
    inside = next((stack.units for stack in stacks if stack.path == name and stack.path), ())
    callable_inside = [unit.name for unit in inside if is_called(unit.module)]
    example = f": blocks=[{_examples(callable_inside)}]" if callable_inside else ""
    return (
        f"blocks= must name modules that are called, but {name!r} is a {type(module).__name__}, which has no forward and "
        f"passes no hidden states. Name the modules in the model that take and return hidden states{example}"
    )


def _can_listen(stack: Stack) -> bool:
    modules = [unit.module for unit in stack.units]
    uncalled = [unit for unit in stack.units if unit.parts is not None]
    return not uncalled or (all(map(holds_norm, uncalled)) and len({*modules}) == len(modules))


def _why_undecided(stack: Stack) -> str:
    unit = stack.units[0]
    return (
        f"The modules in {stack.path} ({len(stack.units)} x {type(unit.module).__name__}) are never called themselves, and "
        "no norm in them receives the hidden state; write each block as a module whose forward returns the hidden state"
    )


def _why_left_out(stack: Stack, twin: str) -> str:
    return (
        f"{stack.path} ({len(stack.units)} blocks): nothing in it trains, and {twin} has the same structure, so it is "
        "taken for a teacher or a reference model; to measure it, name its blocks in blocks="
    )


def _deescalation(block: nn.Module) -> nn.Module | None:
    last = list(block.modules())[-1]  # however the block is wrapped
    return last if type(last).__name__ == "DeEscalation" else None


def _has_tokens_first(block: nn.Module) -> bool:
    return any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in block.modules())


def _resolve(model: nn.Module, names: dict[int, str], entry: nn.Module | str) -> nn.Module:
    if isinstance(entry, nn.Module):
        if id(entry) not in names:
            raise InvalidArgument(f"the {type(entry).__name__} given is not a part of the model")
        return entry
    try:
        return model.get_submodule(entry)
    except AttributeError as error:
        raise InvalidArgument(f"the model has no module named {entry!r}: {error}") from error


def _describe_candidates(model: nn.Module, undecided: Sequence[str]) -> str:
    lists = dict(_outermost_lists(model, ""))
    found = ", ".join(f"{name or 'the model itself'} ({_kinds(m.children())})" for name, m in lists.items())
    nearest = f"the lists of modules in it are {found}" if lists else "it holds no list of modules"
    candidates = _holders_of_mixers(model) or next(filter(None, map(_candidates, lists, lists.values())), [])
    if undecided:
        advice = "; ".join(undecided)
    elif (unregistered := _unregistered(model)) is not None:
        advice = (
            f"{unregistered} holds modules in a plain Python container, so they are no part of the model, nor are their "
            "parameters among its parameters: make it an nn.ModuleList"
        )
    elif candidates:
        advice = f"If these are its blocks, name them: attach(..., blocks=[{_examples(candidates)}])"
    else:
        advice = (
            "Modules that are made in forward are no part of the model: make them in __init__. If the model has blocks, "
            "name the modules whose forward takes and returns hidden states (batch, tokens, width), in depth order: "
            "attach(..., blocks=[...])"
        )
    return (
        f"found no transformer blocks in {type(model).__name__}: expected a ModuleList, Sequential or ModuleDict of modules "
        f"that each mix tokens; {nearest}. {advice}"
    )


def _outermost_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, CONTAINERS) and len(module) > 0:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost_lists(child, f"{path}.{name}".lstrip("."))


def _unregistered(model: nn.Module) -> str | None:
    """Path of a list or tuple of several modules of one class, each made of several, that are no part of the model."""
    known = set(model.modules())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            items = value if isinstance(value, list | tuple) else ()
            strange = [item for item in items if isinstance(item, nn.Module) and item not in known]
            if len(strange) > 1 and len({*map(type, strange)}) == 1 and may_be_block(strange[0]):
                return f"{path}.{name}".lstrip(".")
    return None


def _holders_of_mixers(model: nn.Module) -> list[str]:
    """Names of modules of one class that each hold an attention or the like and at least two further layers."""
    found = {
        name: module
        for name, module in model.named_modules()
        if name
        and is_called(module)
        and has_feed_forward(module)
        and any(itertools.starmap(is_mixer, module.named_children()))
    }
    is_nested = any(name.startswith(f"{other}.") for name in found for other in found)
    return [] if is_nested or len({*map(type, found.values())}) > 1 else list(found)


def _candidates(path: str, container: nn.Module) -> list[str]:
    """Names of modules of one class that may be blocks: they are called, and made of several layers."""
    children = dict(container.named_children())
    are_alike = len({*map(type, children.values())}) == 1 and len(children) > 1
    name = next((part for part in reversed(path.split(".")) if not part.isdecimal()), "")
    is_part = names_feed_forward(name.removesuffix("s")) or names_attention(name)
    if not are_alike or is_part or not all(map(may_be_block, children.values())):
        return []
    return [f"{path}.{name}".lstrip(".") for name in children]


def _examples(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:2])) + (", ..." if len(names) > 2 else "")


def _kinds(modules: Iterable[nn.Module]) -> str:
    kinds = [type(module).__name__ for module in modules]
    return f"{len(kinds)} x {kinds[0]}" if len({*kinds}) == 1 else ", ".join(kinds)
