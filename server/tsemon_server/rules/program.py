"""What all rules together compute of a frame: each quantity once, however many rules look at it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsemon.stacks import Stacks
from tsemon_server.rules.memory import Cell, Memory

NOTHING = np.empty(0)
"""In the place of layers or heads that were not measured."""


@dataclass(frozen=True)
class View:
    """One frame as rules see it. NaN is what could not be computed; a missing name is what was not measured."""

    step: int
    scalars: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, NDArray[np.floating[Any]]] = field(default_factory=dict)
    """One value per layer; of activations layer 0 is the first block's input, layer k the output of the k-th block."""
    heads: Mapping[str, NDArray[np.floating[Any]]] = field(default_factory=dict)
    """(blocks, heads)"""
    frozen: frozenset[int] = frozenset()
    """Blocks, from 0, that are not meant to train."""
    stacks: Stacks | None = None
    """None if all blocks are one stack."""
    stack: int | None = None
    """Which of the stacks this is a view of; None if it has the layers of all."""

    def of_stacks(self) -> list[View]:
        """One view per stack, with the layers and heads of this stack only."""
        if self.stacks is None or self.stack is not None or len(self.stacks.each) < 2:
            return [self]
        of_blocks = self.stacks.spans(self.stacks.num_blocks)
        spans = {self.stacks.num_blocks: of_blocks, self.stacks.num_states: self.stacks.spans(self.stacks.num_states)}

        def cut(arrays: Mapping[str, NDArray[Any]], stack: int) -> dict[str, NDArray[Any]]:
            """Without arrays that no model with these stacks has."""
            known = {name: values for name, values in arrays.items() if len(values) in spans}
            return {name: v[spans[len(v)][stack].start : spans[len(v)][stack].stop] for name, v in known.items()}

        return [
            replace(
                self,
                layers=cut(self.layers, stack),
                heads=cut(self.heads, stack),
                frozen=frozenset(block - blocks.start for block in self.frozen if block in blocks),
                stack=stack,
            )
            for stack, blocks in enumerate(of_blocks)
        ]

    def place(self, layer: int, num_layers: int) -> dict[str, Any]:
        """How evidence names a layer of an array that has `num_layers` in this view."""
        if self.stacks is None or self.stack is None:
            return {"layer": layer}
        has_input = num_layers > self.stacks.each[self.stack].blocks
        num_entries = self.stacks.num_states if has_input else self.stacks.num_blocks
        entry = self.stacks.spans(num_entries)[self.stack].start + layer
        return {"layer": entry, "label": self.stacks.label(entry, num_entries)}

    @property
    def stack_name(self) -> str | None:
        """None if all blocks are one stack."""
        return None if self.stacks is None or self.stack is None else self.stacks.each[self.stack].name


Slots = list[Any]
"""What the nodes gave, in their order: a float, an array, True, False or None (unknown)."""
Compute = Callable[[View, Slots], Any]


class Measure(NamedTuple):
    """What a frame may have."""

    kind: str
    """scalar, layers or heads"""
    name: str

    def of(self, view: View) -> Any:
        """None where it was not measured."""
        return {"scalar": view.scalars, "layers": view.layers, "heads": view.heads}[self.kind].get(self.name)


@dataclass(frozen=True)
class Term:
    """A node of a program, as what stands above it in the definition sees it."""

    index: int
    key: str
    """What it computes: two terms with one key are one."""
    axes: int
    """0: one number, 1: layers, 2: blocks and heads."""
    says: str
    """What it is, for people."""
    measures: frozenset[Measure] = frozenset()
    """What of a frame it is made of."""


KEY_BYTES = 8


def digest(key: str) -> bytes:
    """By which a node, or a rule, finds in a stored state what is its own."""
    return blake2b(key.encode(), digest_size=KEY_BYTES).digest()


MAX_KEY = 4096
MAX_SAYS = 1000
"""Maximum number of characters. `own` repeats the text of all stages before it, so the text could double with each stage."""


def _bounded(term: Term) -> Term:
    """The term with a key and a text of bounded length; equal keys stay equal."""
    key = term.key if len(term.key) <= MAX_KEY else f"sha256:{sha256(term.key.encode()).hexdigest()}"
    says = term.says if len(term.says) <= MAX_SAYS else f"{term.says[:MAX_SAYS]}..."
    return replace(term, key=key, says=says)


class _Node(NamedTuple):
    key: bytes
    compute: Compute | None
    """Of what does not depend on the past."""
    memory: Memory | None
    source: int
    """Where a memory reads."""


class Program:
    """Nodes in an order in which each comes after those that it reads. Two that say the same are one."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._terms: dict[str, Term] = {}

    def read(self, measure: Measure) -> Term:
        """A node that gives a measure of the frame: NaN, or an empty array, where it is not there."""
        axes = ("scalar", "layers", "heads").index(measure.kind)
        nothing = NOTHING if axes else math.nan

        def compute(view: View, slots: Slots) -> Any:
            values = measure.of(view)
            if values is None:
                return nothing
            return np.asarray(values, dtype=np.float64) if axes else values

        return self._add(Term(0, f"{measure.kind}:{measure.name}", axes, measure.name, frozenset([measure])), compute)

    def add(self, key: str, compute: Compute, *, of: Iterable[Term] = (), axes: int, says: str) -> Term:
        """A node that is a function of others."""
        measures = frozenset[Measure]().union(*(term.measures for term in of))
        return self._add(Term(0, key, axes, says, measures), compute)

    def remember(self, term: Term, key: str, memory: Memory, *, says: str) -> Term:
        """A node that is what `memory` makes of another; elementwise, where that has layers."""
        return self._add(Term(0, f"{term.key} | {key}", term.axes, says, term.measures), None, memory, term.index)

    def _add(self, term: Term, compute: Compute | None, memory: Memory | None = None, source: int = -1) -> Term:
        term = _bounded(term)
        if term.key not in self._terms:
            self._terms[term.key] = replace(term, index=len(self._nodes))
            self._nodes.append(_Node(digest(term.key), compute, memory, source))
        return self._terms[term.key]

    @property
    def memory_keys(self) -> dict[bytes, int]:
        """By which the cells of each memory are found again in a stored state, and its node."""
        return {node.key: index for index, node in enumerate(self._nodes) if node.memory is not None}

    def run(self, view: View, cells: list[list[Cell]]) -> Slots:
        """All nodes of one frame. What is remembered, in `cells`, a list for each node, is changed in place."""
        slots: Slots = []
        with np.errstate(all="ignore"):  # a run that fails has numbers of any size
            for (_, compute, memory, source), held in zip(self._nodes, cells, strict=True):
                if compute is not None:
                    slots.append(compute(view, slots))
                elif memory is not None:
                    slots.append(_pushed(memory, held, slots[source], view.step))
        return slots

    def fresh_cells(self) -> list[list[Cell]]:
        return [[] for _ in self._nodes]


def _pushed(memory: Memory, held: list[Cell], value: Any, step: int) -> Any:
    if not isinstance(value, np.ndarray):
        if len(held) != 1:
            held[:] = [[]]
        return memory.push(held[0], np.nan if value is None else float(value), step)
    if not value.size:
        return NOTHING
    if len(held) != value.size:  # another depth: another model
        held[:] = [[] for _ in range(value.size)]
    pushed = [memory.push(cell, x, step) for cell, x in zip(held, value.ravel().tolist(), strict=True)]
    return np.array(pushed).reshape(value.shape)
