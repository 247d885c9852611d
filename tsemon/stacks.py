"""The stacks of a model, and the meaning of each entry of an array of layers.

A model has one stack of blocks or several, such as an encoder and a decoder. Arrays contain the stacks one after the other.
An array of blocks has one entry per block. An array of activations has one more per stack: the input of its first block,
which comes before the outputs of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from tsemon.catalogue import Axis, nearest
from tsemon.errors import UnknownLayer


class Stack(NamedTuple):
    """Blocks that follow each other."""

    name: str
    """A short name such as "decoder"; empty if the model has no other stack."""
    blocks: int


class Entry(NamedTuple):
    """The meaning of one entry of an array."""

    stack: int
    """Number of its stack, from 0."""
    place: int
    """Its number among the entries of this stack, from 0."""
    block: int | None
    """Number of its block in the model, from 0; None for the input of a stack."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """All stacks of a model, in depth order."""

    each: tuple[Stack, ...]

    @classmethod
    def of(cls, num_blocks: int, told: Iterable[Mapping[str, Any]] | None = None) -> Stacks:
        """The stacks as a registration lists them; if it lists none, one that contains all blocks."""
        return cls(tuple(Stack(one["name"], one["blocks"]) for one in told or ()) or (Stack("", num_blocks),))

    @property
    def sizes(self) -> list[int]:
        """The number of blocks of each stack."""
        return [stack.blocks for stack in self.each]

    @property
    def num_blocks(self) -> int:
        return sum(self.sizes)

    @property
    def num_states(self) -> int:
        """Number of entries of an array of activations."""
        return self.num_blocks + len(self.each)

    def num_entries(self, axis: Axis) -> int:
        """Number of entries of an array with this axis."""
        return {"activation": self.num_states, "block": self.num_blocks, "run": 1}[axis]

    def spans(self, num_entries: int) -> list[range]:
        """The entries of each stack in an array with this number of entries: of activations if it fits, else of blocks."""
        has_inputs = num_entries == self.num_states
        edges = accumulate((size + has_inputs for size in self.sizes), initial=0)
        return [range(start, end) for start, end in pairwise(edges)]

    def entry(self, number: int, num_entries: int) -> Entry | None:
        """Entry `number` of an array with `num_entries` entries; None if the model has no arrays of this length."""
        if num_entries not in (self.num_states, self.num_blocks):
            return None
        spans = self.spans(num_entries)
        stack = next((stack for stack, span in enumerate(spans) if number in span), None)
        if stack is None:
            return None
        index = number - spans[stack].start
        num_inputs = stack + 1 if num_entries == self.num_states else 0
        return Entry(stack, index, None if num_inputs and index == 0 else number - num_inputs)

    def number(self, name: str, index: int, num_entries: int) -> int:
        """The entry at `index` of the stack `name`, in an array with `num_entries`; -1 is the last entry of the stack.

        Raises UnknownLayer if there is no such stack or entry.
        """
        names = [stack.name for stack in self.each]
        if name not in names:
            hint = nearest(name, names) if len(names) > 1 else "it has a single stack, so give the number alone"
            raise UnknownLayer(f"the model has no stack {name!r}; {hint}")
        span = self.spans(num_entries)[names.index(name)]
        if not -len(span) <= index < len(span):
            raise UnknownLayer(f"the stack {name!r} has the layers 0 to {len(span) - 1}, -1 is the last; got {index}")
        return span[index]

    def output_of(self, block: int) -> int:
        """The entry of a block's output in an array of activations. The entry before it is the block's input."""
        found = self.entry(block, self.num_blocks)
        if found is None:
            raise ValueError(f"expected a block from 0 to {self.num_blocks - 1}, got {block}")
        return block + found.stack + 1

    def label(self, number: int, num_entries: int) -> str:
        """Return the name of an entry: "decoder 3", or "3" in a model with one stack."""
        found = self.entry(number, num_entries) if len(self.each) > 1 else None
        return str(number) if found is None else f"{self.each[found.stack].name} {found.place}"

    def in_words(self, first: int, last: int) -> str:
        """Return the names of blocks: "block 7", "blocks 7 to 23", or, with several stacks, "block 0 of the decoder"."""
        ends = [self.entry(block, self.num_blocks) for block in (first, last)]
        if len(self.each) < 2 or None in ends:
            return f"block {first}" if first == last else f"blocks {first} to {last}"
        (stack, start, _), (last_stack, end, _) = (one for one in ends if one is not None)
        names = [
            f"the {name}" if name.isidentifier() else f'stack "{name}"'
            for name in (self.each[number].name for number in (stack, last_stack))
        ]
        if stack != last_stack:
            return f"block {start} of {names[0]} to block {end} of {names[1]}"
        return (f"block {start}" if start == end else f"blocks {start} to {end}") + f" of {names[0]}"

    def __str__(self) -> str:
        first, *others = self.each
        return ", ".join([f"{first.name} ({first.blocks} blocks)", *(f"{name} ({n})" for name, n in others)])
