"""The blocks in which a rule is met: those whose values are beyond its thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsemon_server.rules.conditions import BOUNDS
from tsemon_server.rules.grammar import condition, mask
from tsemon_server.rules.parts import Mistake, Part
from tsemon_server.rules.plan import Row
from tsemon_server.rules.program import Measure, Program, Term, View

_OF_ANY = "min", "max", "mean", "median", "last"
"""Reductions over layers that are beyond a threshold because layers are."""
OF_NO_BLOCK = "loss", "diverge"
"""Families of failures that may begin behind the blocks."""


class _Compared(NamedTuple):
    """A comparison, and the same layer by layer."""

    holds: Term | None
    """None: it always counts."""
    mask: Term


class Where:
    """Finds the blocks in which a rule is met.

    By its `where`; if no block meets it, the failure is of the whole stack, or, for `loss` and `diverge`, of no block.
    Without `where`, by each comparison of `when` that holds and that has values of layers: the blocks in which all of
    these hold, or, if no block meets them all, the blocks of the first of them.
    """

    def __init__(self, part: Part, program: Program) -> None:
        """`part`: the definition with its lines parsed. Raises Mistake."""
        self._is_given = "where" in part
        self._is_of_stack = self._is_given and not ("family" in part and part["family"].data in OF_NO_BLOCK)
        if self._is_given:
            self._compared = [_Compared(None, mask(part["where"], program))]
        else:
            self._compared = [*_derived(part["when"].data, program)]

    @property
    def measures(self) -> frozenset[Measure]:
        """The metrics that it reads."""
        return frozenset[Measure]().union(*(one.mask.measures for one in self._compared))

    def blocks(self, seen: Sequence[tuple[Row, View]]) -> tuple[tuple[int, int] | None, bool]:
        """The first and the last of these blocks, as numbers in the model from 0; None if no metric tells.

        The second value is False if no block meets it, so that the whole stack stands for them.
        seen: the numbers of each stack that may be meant.
        """
        found = set[int]().union(*(self._found(values, view) for values, view in seen))
        is_found = bool(found)
        if self._is_of_stack and not found:
            found = found.union(*(_stack(self._compared[0].mask, values, view) for values, view in seen))
        return (min(found), max(found)) if found else None, is_found

    def finds(self, values: Row, view: View) -> bool:
        """True if a block of this stack meets it."""
        return bool(self._found(values, view))

    def _found(self, values: Row, view: View) -> set[int]:
        found = set[int]()
        for one in self._compared:
            if one.holds is None or values[one.holds.index] is True:
                own = _blocks(one.mask, values, view)
                found = found & own or found or own
        return found


def _derived(when: Mapping[str, Any], program: Program) -> Iterator[_Compared]:
    for compared in _comparisons(when):
        each = by_layer(compared)
        if each is not None and _is_of_one_frame(condition, compared) and _is_of_one_frame(mask, each):
            yield _Compared(condition(Part(compared), program), mask(Part(each), program))


def _blocks(mask: Term, values: Row, view: View) -> set[int]:
    """The blocks in which the mask holds, or in which a metric that it reads is infinite."""
    holds = values[mask.index] == 1
    for measure in mask.measures:
        of_layers = view.layers.get(measure.name)
        if of_layers is not None and len(of_layers) == len(holds):
            holds = holds | np.isinf(of_layers)
    return _numbers(np.flatnonzero(holds), len(holds), mask, view)


def _stack(mask: Term, values: Row, view: View) -> set[int]:
    """All blocks of the stack, also if the mask's metric was not measured."""
    if num_entries := len(values[mask.index]):
        return _numbers(np.arange(num_entries), num_entries, mask, view)
    start = view.first_block
    return {*range(start, start + (view.num_blocks or 0))}


def _numbers(entries: NDArray[np.intp], num_entries: int, mask: Term, view: View) -> set[int]:
    """An entry of an array of activations is the output of the block before it; the first is the input of a stack."""
    assert mask.layers is not None
    layers, inputs, start = mask.layers.of(view, num_entries), view.is_of_states(mask.layers.measure), view.first_block
    return {start + layers[entry] - inputs for entry in entries if layers[entry] >= inputs}


def _comparisons(tree: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The comparisons of a condition, but not negated ones."""
    if "value" in tree:
        yield tree
    for item in (*tree.get("all", ()), *tree.get("any", ())):
        yield from _comparisons(item)
    if "condition" in tree:
        yield from _comparisons(tree["condition"])


def by_layer(compared: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same comparison for each layer, if it is of layers."""
    bounds = {name: compared[name] for name in BOUNDS if name in compared}
    value = compared["value"] if "in" in compared else _unreduced(compared["value"])
    return None if value is None or not bounds else {"value": value, **bounds}


def _unreduced(value: Any) -> list[Any] | None:
    """A value without its reduction over layers."""
    if not isinstance(value, list):
        return None
    source, *stages = value
    for place, stage in enumerate(stages):
        if isinstance(stage, dict) and "layers" in stage:
            is_fit = stage["layers"] in _OF_ANY or (isinstance(stage["layers"], dict) and "quantile" in stage["layers"])
            return [source, *stages[:place], *stages[place + 1 :]] if is_fit else None
    inner = _unreduced(source)
    return None if inner is None else [inner, *stages]


def _is_of_one_frame(read: Callable[[Part, Program], Term], tree: Mapping[str, Any]) -> bool:
    """Whether it can be read, and needs no earlier frames."""
    program = Program()
    try:
        read(Part(tree), program)
    except Mistake:
        return False
    return not program.memories
