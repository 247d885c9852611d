"""Find the stacks of a model: containers whose modules are blocks, one behind the other.

A block mixes tokens, by attention or otherwise, and most often has a feed-forward part. The outermost container of such
modules is a stack. If its modules are stages, which hold containers of whole blocks in their turn, those are the blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from tsemon.probes.naming import is_called, is_mixer, is_norm, named_inside, names_feed_forward, words

CONTAINERS = nn.ModuleList, nn.Sequential, nn.ModuleDict
WHOLE_MODEL_WORDS = frozenset({"embed", "embedding", "embeddings", "emb", "pos", "cls", "head", "tokens", "wte", "wpe"})
"""Attributes that a model has before and behind its blocks, and a stage of it has not."""
STAGE_WORDS = frozenset({"stage", "stages", "layer", "layers", "block", "blocks", "chunks"})
"""Names of containers whose modules follow each other, whatever they hold."""
QUERY_KEY_WORDS = frozenset({"q", "k", "qk", "query", "key"})
Predicate = Callable[[nn.Module], bool]


@dataclass(frozen=True, slots=True)
class Parts:
    """Modules to listen to if a block is a container which is never called."""

    called: tuple[nn.Module, ...]
    """Its parts. The first to be called gets the block's input."""
    followers: tuple[nn.Module, ...]
    """Parts of the next block: the first to be called gets the block's output. None behind the last block."""
    owner: nn.Module
    """The innermost module that is called and holds the container."""
    outside: tuple[nn.Module, ...]
    """Layers of the owner outside the container. The first to be called behind the last block may get its output."""


class Unit(NamedTuple):
    """A block, as a stack has it."""

    name: str
    module: nn.Module
    parts: Parts | None


class Stack(NamedTuple):
    path: str
    units: list[Unit]


def find_stacks(model: nn.Module) -> list[Stack]:
    """All stacks in the order of registration, a decoder behind its encoder."""
    for predicate in (_mixes, _is_residual_unit):
        if stacks := list(_Search(model, predicate).stacks(model, "")):
            has_encoder = any("encoder" in words(stack.path) for stack in stacks)
            return sorted(stacks, key=lambda stack: has_encoder and _is_decoder(stack.path))
    return []


def frozen_twins(model: nn.Module, stacks: Sequence[Stack]) -> dict[str, str]:
    """Path of each stack that does not train to the path of its like that does: a teacher, or a reference model."""
    trained = [stack for stack in stacks if _trains(stack)]
    return {
        stack.path: twin.path
        for stack in stacks
        if not _trains(stack)
        for twin in [next((other for other in trained if _are_twins(model, stack, other)), None)]
        if twin is not None
    }


def holds_norm(unit: Unit) -> bool:
    """True if a module of the block normalizes its states, and not queries or keys alone."""
    inside = named_inside(unit.module)
    return any(is_norm(module) and not QUERY_KEY_WORDS & {*words(name)} for _, name, module in inside)


def may_be_block(module: nn.Module) -> bool:
    """True if the module is called and made of several layers, but is no mere part of a block."""
    is_part = names_feed_forward(type(module).__name__) or is_norm(module) or is_mixer("", module)
    return is_called(module) and not is_part and any(module.children()) and len(_matrices(module)) >= 2


class _Search:
    def __init__(self, model: nn.Module, predicate: Predicate) -> None:
        self._model = model
        self._is_block = predicate
        self._seen = set[int]()

    def stacks(self, module: nn.Module, path: str) -> Iterator[Stack]:
        """The outermost stacks in the module."""
        if isinstance(module, CONTAINERS) and (found := self._read(module, path)):
            yield from (stack for stack in found if id(stack.units[0].module) not in self._seen)
            self._seen |= {id(stack.units[0].module) for stack in found}
            return
        for name, child in module.named_children():
            yield from self.stacks(child, _joined(path, name))

    def _read(self, container: nn.Module, path: str) -> list[Stack]:
        keys = [key for key, module in container._modules.items() if module is not None]
        if isinstance(container, nn.ModuleDict) and not all(key[-1:].isdecimal() for key in keys):
            return []  # alternatives, or the parts of a model
        named = [(_joined(path, key), container.get_submodule(key)) for key in keys]
        # What keeps a place in the numbering (DINOv2's chunks) has no parameters.
        named = [(name, m) for name, m in named if any(True for _ in m.parameters())] or named
        blocks = [(name, module) for name, module in named if self._is_block(module)]
        if not blocks:
            return []
        inner = [self._stage(name, module) for name, module in blocks]
        num_stages = sum(map(bool, inner))
        if 2 * num_stages < len(blocks) or all(_is_wrapper(*each) for each in zip(blocks, inner, strict=True)):
            return self._stack(container, path, named, [module for _, module in blocks])
        stacks = list(itertools.chain(*inner))
        if _is_one_depth(container, path, [module for _, module in blocks]):
            return [Stack(path, [unit for stack in stacks for unit in stack.units])]
        return stacks

    def _stage(self, path: str, module: nn.Module) -> list[Stack]:
        """The stacks in a module that is no block itself, but holds blocks."""
        stacks = list(_Search(self._model, self._is_block).stacks(module, path))
        units = [unit for stack in stacks for unit in stack.units]
        inside = {id(p) for unit in units for p in unit.module.parameters()}
        num_outside = len({*_matrices(module)} - inside)
        are_whole = all(has_feed_forward(unit.module) for unit in units)
        do_mix = all(self._is_block(unit.module) for unit in units)  # else a list of a block's own parts, as T5 has it
        return stacks if are_whole or (is_called(module) and do_mix and num_outside <= 1) else []

    def _stack(
        self, container: nn.Module, path: str, named: list[tuple[str, nn.Module]], blocks: list[nn.Module]
    ) -> list[Stack]:
        ids, kinds = [*map(id, blocks)], {type(block) for block in blocks} - {nn.Sequential, *CONTAINERS}
        places = [place for place, (_, module) in enumerate(named) if id(module) in ids]
        if not any(is_called(module) for _, module in named):
            groups = _groups(named, places)
        else:  # in hybrids not every block has attention
            # A Sequential may have an embedding and a head at its ends.
            between = range(places[0], places[-1]) if isinstance(container, nn.Sequential) else range(len(named))
            groups = [
                [(name, module)]
                for place, (name, module) in enumerate(named)
                if place in places or type(module) in kinds or (place in between and _is_residual_unit(module))
            ]
        if len(groups) == 1 and len(groups[0]) < len(named) and not has_feed_forward(blocks[0]):
            return []  # attention and feed-forward part of the only block, or pooling by attention
        owner = _owner(self._model, path)
        inside = {*container.modules()}
        outside = tuple(m for m in owner.modules() if m not in inside and not any(m.children()) and is_called(m))
        units = []
        for number, group in enumerate(groups):
            followers = _called([m for _, m in groups[number + 1]]) if number + 1 < len(groups) else ()
            name, module = group[0]
            if len(group) > 1:
                name = f"{name}-{group[-1][0].rpartition('.')[2]}"
                module = nn.ModuleList([m for _, m in group])
            called = _called([module])
            parts = None if called == (module,) else Parts(called, followers, owner, outside)
            units.append(Unit(name, module, parts))
        return [Stack(path, units)]


def _is_wrapper(block: tuple[str, nn.Module], stacks: Sequence[Stack]) -> bool:
    """True for a module that holds nothing but one block."""
    units = [unit for stack in stacks for unit in stack.units]
    return len(units) == 1 and {*map(id, block[1].parameters())} == {*map(id, units[0].module.parameters())}


def _groups(named: list[tuple[str, nn.Module]], places: list[int]) -> list[list[tuple[str, nn.Module]]]:
    """Lists of parts, in which attentions and the feed-forward part may be entries of their own (x-transformers)."""
    if len(places) < len(named):
        places = [place for place in places if place - 1 not in places]  # not an attention to an encoder
    return [named[start:end] for start, end in itertools.pairwise([0, *places[1:], len(named)])]


def _called(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules, with the parts of containers that are never called in their place."""
    return tuple(
        found
        for module in modules
        for found in (
            (module,) if is_called(module) else _called([m for m in module._modules.values() if m is not None])
        )
    )


def _owner(model: nn.Module, path: str) -> nn.Module:
    """The innermost module that is called and holds the container at this path."""
    parts = path.split(".")[:-1]
    above = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts), 0, -1)]
    return next((module for module in above if is_called(module) and not isinstance(module, nn.Sequential)), model)


def _mixes(module: nn.Module) -> bool:
    return any(is_mixer(name, inner) for _, name, inner in named_inside(module))


def _is_residual_unit(module: nn.Module) -> bool:
    """True for a module with a norm over the width and at least two layers: most likely a block without attention."""
    has_norm = any(is_norm(inner) and "batch" not in words(type(inner).__name__) for inner in module.modules())
    return has_norm and len(_matrices(module)) >= 2


def _matrices(module: nn.Module) -> list[int]:
    return [
        id(p)
        for inner in module.modules()
        if not isinstance(inner, nn.Embedding)
        for p in inner.parameters(recurse=False)
        if len(getattr(p, "ds_shape", p.shape)) >= 2  # DeepSpeed keeps empty parameters
    ]


def mixers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside that mix tokens, but not whole layers that are called after their attention."""
    for _, name, inner in named_inside(module):
        if is_mixer(name, inner) and not (has_feed_forward(inner) and _mixes(inner)):
            yield inner


def has_feed_forward(module: nn.Module) -> bool:
    """True if it has at least two layers beside what mixes tokens."""
    mixing = {id(p) for mixer in mixers(module) for p in mixer.parameters()}
    return len({*_matrices(module)} - mixing) >= 2


def _is_one_depth(container: nn.Module, path: str, stages: Sequence[nn.Module]) -> bool:
    """True for stages that follow each other, False for models side by side."""
    if len({type(stage) for stage in stages}) > 1:
        return False
    if isinstance(container, nn.Sequential) or STAGE_WORDS & {*words(path.rpartition(".")[2])}:
        return True
    return not any(map(_is_whole_model, stages))


def _is_whole_model(module: nn.Module) -> bool:
    names = [*dict(module.named_children()), *dict(module.named_parameters(recurse=False))]
    return any(WHOLE_MODEL_WORDS & {*words(name)} for name in names) or any(map(is_norm, module.children()))


def _is_decoder(path: str) -> bool:
    found = words(path)
    return "decoder" in found and "encoder" not in found


def _trains(stack: Stack) -> bool:
    parameters = [p for unit in stack.units for p in unit.module.parameters()]
    return not parameters or any(p.requires_grad for p in parameters)


def _are_twins(model: nn.Module, one: Stack, other: Stack) -> bool:
    """True for stacks of the same blocks in models of the same class."""
    paths = [stack.path.split(".") for stack in (one, other)]
    num_shared = len(list(itertools.takewhile(lambda parts: parts[0] == parts[1], zip(*paths, strict=False))))
    roots = [model.get_submodule(".".join(path[: num_shared + 1])) for path in paths]
    blocks = [stack.units[0].module for stack in (one, other)]
    return (
        type(roots[0]) is type(roots[1])
        and _is_decoder(one.path) == _is_decoder(other.path)
        and type(blocks[0]) is type(blocks[1])
        and {*dict(blocks[0].named_parameters())} == {*dict(blocks[1].named_parameters())}
    )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
