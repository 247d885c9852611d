"""Find the transformer blocks of a model, and in each its self-attention, without being told."""

from __future__ import annotations

import gc
import itertools
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument, NoBlocksFound

ATTENTION_NAME = re.compile(r"attn|attention", re.IGNORECASE)
# What is named after attention, but is not the self-attention: its norms and dropouts, and attention to an encoder.
NOT_ATTENTION = re.compile(r"norm|ln|drop|cross|encdec|multihead_attn", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Block:
    """One transformer block, and the places in it where a probe can listen."""

    name: str
    """Where it is in the model; of a module that several layers share, also which of them: "layer (2 of 12)"."""
    number: int
    """Its place in the depth of the whole model, from 0; in a pipeline's later stage the first block is not 0."""
    module: nn.Module
    attention: nn.Module | None
    deescalation: nn.Module | None
    """The step that removes the mean token at the block's end, where the block has one: its input is the state that
    the block computed, its output is what the next block sees."""
    tokens_first: bool
    """Whether hidden states are (tokens, batch, width), as in `torch.nn` modules with `batch_first=False`."""
    stack: int
    """Which of the model's stacks it belongs to: 0, and 1 for the decoder behind an encoder."""


def find_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module | str] | None = None,
    attention: Sequence[nn.Module | str] | None = None,
) -> list[Block]:
    """The model's blocks in depth order.

    A stack is a `ModuleList` or `Sequential` whose children are of one class and each hold a self-attention; several
    stacks (an encoder and a decoder) follow each other. `blocks` and `attention` name modules instead, by dotted name or
    as modules, for models where that does not hold. A module that is applied several times (ALBERT, Universal
    Transformers) is as many blocks; `blocks` names it once for each. Raises NoBlocksFound, or InvalidArgument for a name
    that is not in the model.
    """
    names = {id(module): name for name, module in model.named_modules()}
    if blocks is not None:
        found, stacks = [_resolve(model, names, entry) for entry in blocks], [0] * len(blocks)
    else:
        # A list may hold one module several times, once for each time that it is applied.
        numbered = [(child, number) for number, stack in enumerate(_stacks(model)) for child in stack]
        numbered = [layer for layer in numbered for _ in range(_num_applications(model, len(numbered)))]
        found, stacks = [child for child, _ in numbered], [number for _, number in numbered]
    if not found:
        raise NoBlocksFound(_describe_candidates(model))
    if attention is None:
        attentions = [_self_attention(block) for block in found]
    elif len(attention) == len(found):
        attentions = [_resolve(model, names, entry) for entry in attention]
    else:
        raise InvalidArgument(
            f"attention= needs one module per block: there are {len(found)} blocks, got {len(attention)} attentions"
        )
    return [
        Block(name, number, module, attended, _deescalation(module), _has_tokens_first(module), stack)
        for number, (name, module, attended, stack) in enumerate(
            zip(_names(found, names), found, attentions, stacks, strict=True)
        )
    ]


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


def hidden_width(block: Block) -> int | None:
    """D, which is what the first linear layer of the self-attention takes."""
    if block.attention is None:
        return None
    return next((widths(module)[0] for module in block.attention.modules() if is_linear(module)), None)


def innermost_attention(attention: nn.Module) -> nn.Module:
    """What computes attention in a module that is called so but may do more: add the residual, normalise the sum."""
    inner = _self_attention(attention)
    if inner is None or not any(is_linear(module) for module in inner.children()):
        return attention
    return innermost_attention(inner)


def is_compiled(module: nn.Module) -> bool:
    """Whether the module, or a part of it, is compiled: what is changed in it then is compiled again."""
    return any(runs_compiled(part) for part in module.modules())


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


def _stacks(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
    """Outermost stacks first to last in the order of registration; nothing inside a stack counts again."""
    if _is_stack(module):
        yield module
    else:
        for child in module.children():
            yield from _stacks(child)


def _is_stack(module: nn.Module) -> TypeGuard[nn.ModuleList | nn.Sequential]:
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len({type(child) for child in children}) == 1
        and all(_self_attention(child) is not None for child in children)
    )


def _num_applications(model: nn.Module, num_found: int) -> int:
    """How often each module is applied in a row: ALBERT's config tells that it has fewer groups of weights than layers."""
    for config in (getattr(module, "config", None) for module in model.modules()):
        num_layers = getattr(config, "num_hidden_layers", 0)
        if num_found and getattr(config, "num_hidden_groups", 0) == num_found and num_layers % num_found == 0:
            return int(num_layers // num_found)
    return 1


def _names(found: list[nn.Module], names: dict[int, str]) -> Iterator[str]:
    """The module's name; of a module that is several layers, also which of them."""
    total, so_far = Counter(map(id, found)), Counter[int]()
    for module in found:
        so_far[id(module)] += 1
        suffix = f" ({so_far[id(module)]} of {total[id(module)]})" if total[id(module)] > 1 else ""
        yield names[id(module)] + suffix


def _self_attention(block: nn.Module) -> nn.Module | None:
    """The shallowest submodule that is called attention, by its class or by its place."""
    candidates = [
        (name.count("."), module)
        for name, module in block.named_modules()
        if name and _is_called_attention(name.rpartition(".")[2], module)
    ]
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def _is_called_attention(name: str, module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.Linear) or NOT_ATTENTION.search(name):
        return False
    class_name = type(module).__name__
    return bool(ATTENTION_NAME.search(name) or ATTENTION_NAME.search(class_name)) and not NOT_ATTENTION.search(
        class_name
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


def _describe_candidates(model: nn.Module) -> str:
    lists = {name: _kinds(m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    found = ", ".join(f"{name} ({kinds})" for name, kinds in lists.items())
    nearest = f"the lists of modules in it are {found}" if lists else "it holds no list of modules"
    children = [name for name, _ in model.named_children()]
    examples = [*(f"{name}.0".lstrip(".") for name in lists), *children]
    example = f"{examples[0]!r}, ..." if examples else "..."
    return (
        f"found no transformer blocks in {type(model).__name__}: expected a ModuleList or Sequential whose modules are of "
        f"one class and each hold a self-attention; {nearest}. Name the blocks: attach(..., blocks=[{example}])"
    )


def _kinds(modules: Iterable[nn.Module]) -> str:
    kinds = [type(module).__name__ for module in modules]
    return f"{len(kinds)} x {kinds[0]}" if len(set(kinds)) == 1 else ", ".join(kinds)
