"""Which parameter of a checkpoint counts where, by its name alone: the model that it belongs to need not be there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tsemon.catalogue import nearest
from tsemon.errors import InvalidArgument
from tsemon.probes.depth import named_stacks
from tsemon.probes.groups import EMBEDDING, EMBEDDING_NAME, HEAD, HEAD_NAME, OTHER
from tsemon.probes.naming import names_self_attention
from tsemon.stacks import Stacks

WRAPPER = re.compile(r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What DistributedDataParallel, torch.compile and the like put into names."""
EMBEDDING_MODULE = re.compile(r"emb(?!ed_out)|^(wte|wpe|shared|positions?|types?|relative_attention_bias)$")
OUTPUT_EMBEDDING = re.compile(r"(^|\.)embed_out$")
BUFFER = re.compile(r"(^|\.)(running_mean|running_var|inv_freq|masked_bias)$")
"""Tensors of floats that are no parameters, of a batch norm, of rotary positions, of an attention's mask."""
MASK = re.compile(r"attn\.bias$|attention\.bias$")
"""GPT-2's mask, where it has four axes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint, as it can be known without reading it."""

    shape: tuple[int, ...]
    is_floating: bool
    same_as: str | None = None
    """The name of an earlier tensor in the same memory: weights that are tied."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The parameters, each once, by where they count."""

    blocks: tuple[str, ...]
    """Names of the blocks in depth order; none where no stack was found."""
    stacks: Stacks
    members: Mapping[int, tuple[str, ...]]
    """By number of the block, and by OTHER, EMBEDDING and HEAD; the names as the checkpoint has them."""

    @property
    def names(self) -> list[str]:
        return [name for members in self.members.values() for name in members]


def group_names(entries: Mapping[str, Entry], blocks: Sequence[str] = ()) -> Groups:
    """Blocks first to last, then what belongs to none, the embeddings and the output head; scalars and buffers left out.

    A stack of blocks is a name with numbered parts (`h.0`, `h.1`, ...) that each hold a self-attention; a decoder comes
    behind its encoder. `blocks` names stacks instead: ["transformer.h"]. Raises InvalidArgument for one that is not there.
    """
    parts = {name: WRAPPER.sub("", name).split(".") for name in entries}
    stacks = _given(parts, blocks) if blocks else _found(parts)
    numbers = {block: number for number, block in enumerate(b for stack, size in stacks for b in _blocks(stack, size))}
    block_of = {
        name: next((n for n in map(numbers.get, _beginnings(p)) if n is not None), None) for name, p in parts.items()
    }
    modules = {".".join(p) for p in parts.values()}
    tied: dict[str, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        tied[entry.same_as or name].append(name)

    def is_embedding(name: str) -> bool:
        return block_of[name] is None and _is_embedding(parts[name], entries[name], modules)

    head = _head([p for name, p in parts.items() if block_of[name] is None and len(entries[name].shape) == 2])
    members: dict[int, list[str]] = defaultdict(list)
    is_tied = False
    for name, entry in entries.items():
        if entry.same_as is None and _is_parameter(name, entry):
            if (number := block_of[name]) is not None:
                group = number  # also a table of relative positions
            elif any(map(is_embedding, tied[name])):
                group = EMBEDDING
                is_tied = is_tied or any(parts[other] == [*head, "weight"] for other in tied[name])
            else:
                group = HEAD if head and parts[name][:-1] == head else OTHER
            members[group].append(name)
    if is_tied:  # what else the head has is a part like others
        members[OTHER] += members.pop(HEAD, [])
    depth = named_stacks(stacks) if stacks else Stacks.of(0)
    return Groups(tuple(numbers), depth, {group: tuple(names) for group, names in sorted(members.items()) if names})


def _head(outside: Sequence[list[str]]) -> list[str]:
    """The last of the modules outside the blocks that are called an output head; none where there is none."""
    modules = [path for *path, leaf in outside if leaf == "weight"]
    heads = [p for p in modules if HEAD_NAME.search(".".join(p)) or OUTPUT_EMBEDDING.search(".".join(p))]
    return heads[-1] if heads else []


def _is_parameter(name: str, entry: Entry) -> bool:
    num_entries = 1
    for length in entry.shape:
        num_entries *= length
    if not entry.is_floating or num_entries <= 1 or BUFFER.search(name):
        return False
    return not (len(entry.shape) == 4 and MASK.search(name))


def _is_embedding(parts: Sequence[str], entry: Entry, modules: Collection[str]) -> bool:
    *path, leaf = parts
    if EMBEDDING_NAME.search(leaf):
        return True
    if leaf != "weight" or len(entry.shape) != 2 or not path or not EMBEDDING_MODULE.search(path[-1]):
        return False
    return ".".join([*path, "bias"]) not in modules  # a linear layer has one


def _found(parts: Mapping[str, list[str]]) -> list[tuple[str, int]]:
    """The outermost stacks with their sizes, in the order of names."""
    sizes = {name: len(stack) for name, stack in _numbered(parts).items() if _is_whole(stack) and all(stack.values())}
    outermost = [name for name in sizes if not any(_is_within(name, other) for other in sizes)]
    has_encoder = any("encoder" in name for name in outermost)
    # Names in a safetensors file are sorted, which puts the decoder first.
    outermost.sort(key=lambda name: has_encoder and "decoder" in name and "encoder" not in name.replace("decoder", ""))
    return [(name, sizes[name]) for name in outermost]


def _given(parts: Mapping[str, list[str]], stacks: Sequence[str]) -> list[tuple[str, int]]:
    numbered = _numbered(parts)
    for stack in stacks:
        if stack not in numbered:
            raise InvalidArgument(f"no parameter's name begins with {stack}.0; {nearest(stack, list(numbered))}")
        if not _is_whole(numbered[stack]):
            raise InvalidArgument(f"the blocks of {stack} are not numbered from 0 on: {sorted(numbered[stack])}")
    return [(stack, len(numbered[stack])) for stack in stacks]


def _numbered(parts: Mapping[str, list[str]]) -> dict[str, dict[int, bool]]:
    """The numbers that follow each beginning of a name, and whether a self-attention is below them."""
    found: dict[str, dict[int, bool]] = {}
    for path in parts.values():
        for place, part in enumerate(path[:-1]):
            if part.isdecimal():
                stack = found.setdefault(".".join(path[:place]), {})
                has_attention = any(map(names_self_attention, path[place + 1 : -1]))
                stack[int(part)] = stack.get(int(part), False) or has_attention
    return found


def _blocks(stack: str, size: int) -> Iterator[str]:
    return (f"{stack}.{number}".lstrip(".") for number in range(size))


def _beginnings(path: Sequence[str]) -> Iterator[str]:
    return (".".join(path[:end]) for end in range(1, len(path)))


def _is_whole(stack: Mapping[int, bool]) -> bool:
    return set(stack) == set(range(len(stack)))


def _is_within(name: str, other: str) -> bool:
    return name != other and name.startswith(f"{other}." if other else "")
