"""The quantities that all rules together compute from frames, each of them once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsemon.catalogue import LAYERED
from tsemon.stacks import Stacks
from tsemon_server.rules.costs import Priced, Work, elementwise, remembering
from tsemon_server.rules.memory import Memory
from tsemon_server.rules.remembering import Span, of_arrays, of_numbers


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

    def place(self, layer: int, *, is_of_states: bool) -> dict[str, Any]:
        """How evidence names a layer of an array of blocks, or of hidden states, in this view.

        Its `block` is the number in the model, from 0, or null for the input of a stack.
        """
        if self.stacks is None:
            return {"layer": layer, "block": layer - is_of_states if layer >= is_of_states else None}
        num_entries = self.stacks.num_states if is_of_states else self.stacks.num_blocks
        entry = self.stacks.spans(num_entries)[self.stack].start + layer if self.stack is not None else layer
        found = self.stacks.entry(entry, num_entries)
        label = {} if self.stack is None else {"label": self.stacks.label(entry, num_entries)}
        return {"layer": entry, "block": None if found is None else found.block, **label}

    @property
    def num_blocks(self) -> int | None:
        """Number of its blocks; None if nothing tells."""
        if self.stacks is not None:
            return self.stacks.num_blocks if self.stack is None else self.stacks.each[self.stack].blocks
        known = (len(of) - (LAYERED[name].axis == "activation") for name, of in self.layers.items() if name in LAYERED)
        return next(known, None)

    def is_of_states(self, measure: Measure) -> bool:
        """True if its layers are hidden states: the input of the first block, then the output of each block."""
        if measure.kind != "layers":
            return False
        if measure.name in LAYERED:
            return LAYERED[measure.name].axis == "activation"
        of, num_blocks = measure.of(self), self.num_blocks  # a user's own metric
        if self.stacks is not None and self.stack is None:
            return of is not None and len(of) == self.stacks.num_states
        return of is not None and num_blocks is not None and len(of) == num_blocks + 1

    @property
    def first_block(self) -> int:
        """The number of its first block in the model."""
        if self.stacks is None or self.stack is None:
            return 0
        return self.stacks.spans(self.stacks.num_blocks)[self.stack].start

    def has(self, blocks: tuple[int, int] | None) -> bool:
        """False if these blocks, as numbers in the model, are not all in the stack of this view."""
        if blocks is None or self.stacks is None or self.stack is None:
            return True
        span = self.stacks.spans(self.stacks.num_blocks)[self.stack]
        return blocks[0] in span and blocks[1] in span

    def in_words(self, first: int, last: int) -> str:
        """The names of blocks, given as numbers in the model."""
        return (self.stacks or Stacks.of(0)).in_words(first, last)

    @property
    def stack_name(self) -> str | None:
        """None if all blocks are one stack."""
        return None if self.stacks is None or self.stack is None else self.stacks.each[self.stack].name


class Measure(NamedTuple):
    """What a frame may have."""

    kind: str
    """scalar, layers or heads"""
    name: str

    def of(self, view: View) -> Any:
        """None where it was not measured."""
        if self.kind == "scalar":
            return view.scalars.get(self.name)
        return (view.layers if self.kind == "layers" else view.heads).get(self.name)


class Layers(NamedTuple):
    """The layers of a term: all layers of a metric, or a part of them."""

    measure: Measure
    cuts: tuple[slice, ...] = ()

    def of(self, view: View, num: int) -> range:
        """The layer in the metric of each of the term's `num` layers, as the numbers in this view."""
        found = self.measure.of(view)
        layers = range(num if found is None else len(found))
        for cut in self.cuts:
            layers = layers[cut]
        return layers if len(layers) == num else range(num)  # remembered values may be of another depth


@dataclass(frozen=True, slots=True)
class Term:
    """A node of a program, as what stands above it in the definition sees it."""

    index: int
    key: str
    """Two terms with one key are one."""
    axes: int
    """0: one number, 1: layers, 2: blocks and heads."""
    says: str
    """Its description for people."""
    measures: frozenset[Measure] = frozenset()
    """The parts of a frame from which it is computed."""
    layers: Layers | None = None
    """Its layers, if it has axes. A term that joins several has the layers of the first."""
    number: float | None = None
    """Its value, if it is a constant."""


KEY_BYTES = 8


def digest(key: str) -> bytes:
    """By which a node, or a rule, finds in a stored state what is its own."""
    return blake2b(key.encode(), digest_size=KEY_BYTES).digest()


MAX_KEY = 4096
MAX_SAYS = 1000
"""Maximum number of characters. `own` repeats the text of all stages before it, so the text could double with each stage."""


def bounded(key: str) -> str:
    """The key with a bounded length; equal keys stay equal."""
    return key if len(key) <= MAX_KEY else f"sha256:{sha256(key.encode()).hexdigest()}"


Compute = Callable[[Sequence[View], list[Any]], Any]
"""The column of a node, from the frames and the columns of the nodes that it reads."""


_NODE_BYTES = 1_000


Needs = Literal["all", "one", "none"]
"""How many of the inputs of a node must be known before it can have a value or, as a condition, hold."""


class Node(NamedTuple):
    """One of the three is there: `measure` of an array, `remember` of a memory, `compute` of all else."""

    compute: Compute | None = None
    remember: Callable[[Sequence[Span], Any], Any] | None = None
    measure: Measure | None = None
    reads: tuple[int, ...] = ()
    work: Work = Work(0)
    needs: Needs = "all"


class Program:
    """Nodes, each after the nodes that it reads. Two that say the same are one.

    Frames go through it together, node by node: no node depends on the verdict of a rule.
    """

    def __init__(self) -> None:
        self._terms: dict[str, Term] = {}
        self.nodes: list[Node] = []
        self.memories: dict[int, Memory] = {}
        """The nodes that remember, in order."""
        self.shown: dict[str, Term] = {}
        """Numbers whose last samples are kept, by key."""

    def constant(self, number: float) -> Term:
        """A node that is the same in each frame."""
        term = Term(0, json.dumps(number), 0, f"{number:g}", number=number)
        return self._add(term, Node(lambda views, _: [number] * len(views), work=elementwise(0, 0)))

    def read(self, measure: Measure) -> Term:
        """A node that gives a measure of the frame: NaN, or no array, where it is not there."""
        axes, name = ("scalar", "layers", "heads").index(measure.kind), measure.name
        layers = Layers(measure) if axes else None
        term = Term(0, f"{measure.kind}:{name}", axes, name, frozenset([measure]), layers)
        work = elementwise(axes, 2)
        if axes:
            return self._add(term, Node(measure=measure, work=work))
        return self._add(
            term, Node(lambda views, _: [float(view.scalars.get(name, math.nan)) for view in views], work=work)
        )

    def add(
        self,
        key: str,
        compute: Compute,
        *,
        of: Sequence[Term],
        reads: Sequence[Term] | None = None,
        axes: int,
        says: str,
        work: Work,
        needs: Needs = "all",
        cut: slice = slice(None),
    ) -> Term:
        """A node that is a function of others; `reads` are those whose columns it needs, if not all.

        cut: the part of the layers that it keeps.
        """
        measures = frozenset[Measure]().union(*(term.measures for term in of))
        needed = tuple(term.index for term in (of if reads is None else reads))
        layers = next((term.layers for term in of if term.layers is not None), None) if axes else None
        if layers is not None and cut != slice(None):
            layers = layers._replace(cuts=(*layers.cuts, cut))
        made = Term(0, key, axes, says, measures, layers)
        return self._add(made, Node(compute, reads=needed, work=work, needs=needs))

    def remember(self, term: Term, key: str, memory: Memory, *, says: str) -> Term:
        """A node that is what `memory` makes of another; elementwise, where that has layers."""
        num_nodes, remember = len(self.nodes), (of_arrays if term.axes else of_numbers)(memory, len(self.memories))
        work = remembering(term.axes, memory.us, memory.num_kept)
        node = Node(remember=remember, reads=(term.index,), work=work)
        made = self._add(Term(0, f"{term.key} | {key}", term.axes, says, term.measures, term.layers), node)
        if len(self.nodes) > num_nodes:
            self.memories[made.index] = memory
        return made

    def show(self, term: Term) -> str:
        """Keep the last samples of a number, so that they can be shown; gives its key in `shown`."""
        key = bounded(f"{term.key} | recent")
        self.shown[key] = term
        return key

    def _add(self, term: Term, node: Node) -> Term:
        says = term.says if len(term.says) <= MAX_SAYS else f"{term.says[:MAX_SAYS]}..."
        term = replace(term, index=len(self.nodes), key=bounded(term.key), says=says)
        if term.key not in self._terms:
            self._terms[term.key] = term
            self.nodes.append(node)
        return self._terms[term.key]

    def needed_for(self, terms: Iterable[Term]) -> set[int]:
        """The nodes of these terms, of all memories, and of all that they read."""
        needed = {*self.memories, *(term.index for term in (*terms, *self.shown.values()))}
        for index in reversed(range(len(self.nodes))):
            if index in needed:
                needed.update(self.nodes[index].reads)
        return needed

    def priced(self, needed: Collection[int]) -> list[Priced]:
        """Each of these nodes as people read it, with its cost."""
        each = enumerate(zip(self._terms.values(), self.nodes, strict=True))
        return [Priced(term.says, node.work) for index, (term, node) in each if index in needed]

    @property
    def terms(self) -> list[Term]:
        """The term of each node."""
        return [*self._terms.values()]

    @property
    def size_bytes(self) -> int:
        """Estimated memory of the nodes."""
        return sum(_NODE_BYTES + len(term.key) + len(term.says) for term in self._terms.values())

    def cell_keys(self) -> dict[bytes, int]:
        """The key of each cell in a stored state, and its place."""
        keys = [*self._terms]
        each = [*(keys[memory] for memory in self.memories), *self.shown]
        return {digest(key): place for place, key in enumerate(each)}
