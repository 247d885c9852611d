"""The block that is nearest to meeting a rule in one frame.

Distances are in decades of the value, or of its odds if the metric is a share between 0 and 1. They are negative beyond the
threshold. If a rule has several conditions on blocks that must hold together, the farthest one counts. Conditions on the
shape over depth have no distance and are left out, and so are rules that need earlier frames or numbers of the whole run.

Axes: B blocks of a stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsemon.catalogue import LAYERED
from tsemon_server.rules.grammar import condition, value
from tsemon_server.rules.parts import Part
from tsemon_server.rules.plan import Batch, Plan, Row
from tsemon_server.rules.program import Program, Term, View
from tsemon_server.rules.rule import Rule
from tsemon_server.rules.where import by_layer

FARTHEST = 99.0
"""Largest distance in decades. A value of 0 is this far from any threshold above it, which tells nothing."""


class Near(NamedTuple):
    """The block that is nearest to a threshold."""

    rule: str
    metric: str
    """The metric, or the expression, that the rule compares."""
    place: Mapping[str, Any]
    """`layer`, its entry in arrays of this metric; in a model with several stacks also its `label`."""
    value: float
    threshold: float
    decades: float


@dataclass(frozen=True)
class _Compared:
    """A value of each block and its threshold."""

    value: Term
    threshold: float
    is_below: bool
    """True if values below the threshold meet the condition."""

    def decades_B(self, row: Row) -> NDArray[np.float64]:
        """The distance of each block; empty if the frame lacks the metric."""
        names = [LAYERED.get(measure.name) for measure in self.value.measures]
        is_share = len(names) == 1 and names[0] is not None and (names[0].low, names[0].high) == (0, 1)
        beyond_B = _decades(self.values_B(row), is_share) - _decades(np.float64(self.threshold), is_share)
        decades_B: NDArray[np.float64] = np.clip(beyond_B if self.is_below else -beyond_B, -FARTHEST, FARTHEST)
        return decades_B

    def values_B(self, row: Row) -> NDArray[np.float64]:
        values: NDArray[np.float64] = row[self.value.index]
        return values[self.is_of_states :]

    @property
    def is_of_states(self) -> bool:
        """True if its layers are hidden states. Only metrics of the catalogue have a distance."""
        return self.value.layers is not None and View(0).is_of_states(self.value.layers.measure)


def _decades(x: Any, is_share: bool) -> Any:
    return np.log10(x / (1 - x)) if is_share else np.log10(x)


@dataclass(frozen=True)
class _Joined:
    parts: Sequence[_Compared | _Joined]
    is_all: bool


class _Found(NamedTuple):
    decades_B: NDArray[np.float64]
    compared_B: Sequence[_Compared]
    """The comparison that decides in each block."""


class Nearness:
    """Rules, ready to be compared with single frames."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        program = Program()
        read = [(rule.name, _read(rule.tree["when"], program)) for rule in rules if rule.on == "frame"]
        self._rules = [(name, tree) for name, tree in read if isinstance(tree, _Compared | _Joined)]
        self._plan = Plan(program, [])

    def nearest(self, frame: View) -> Near | None:
        """The block of this frame that is nearest to a rule; None if the frame has no metric that tells."""
        views = frame.of_stacks()
        batch = Batch(self._plan, views, [])
        with np.errstate(all="ignore"):
            each = [near for row, view in enumerate(views) for near in self._of_stack(Row(batch, row), view)]
        return min(each, key=lambda near: near.decades, default=None)

    def _of_stack(self, row: Row, view: View) -> Iterable[Near]:
        for name, tree in self._rules:
            found = _distances(tree, row)
            if found is None or not (found.decades_B < FARTHEST).any():
                continue
            block = int(np.nanargmin(found.decades_B))
            compared = found.compared_B[block]
            yield Near(
                rule=name,
                metric=compared.value.says,
                place=view.place(block + compared.is_of_states, is_of_states=compared.is_of_states),
                value=float(compared.values_B(row)[block]),
                threshold=compared.threshold,
                decades=float(found.decades_B[block]),
            )


_UNKNOWN = "unknown"


def _read(tree: Mapping[str, Any], program: Program) -> _Compared | _Joined | str | None:
    """The comparisons of a condition that have a distance; None if it has none, _UNKNOWN if one frame does not tell."""
    if "value" in tree:
        return _comparison(tree, program)
    for name in ("all", "any"):
        if name in tree:
            parts = [_read(part, program) for part in tree[name]]
            known = [part for part in parts if isinstance(part, _Compared | _Joined)]
            if _UNKNOWN in parts and (name == "all" or not known):
                return _UNKNOWN
            return _Joined(known, name == "all") if known else None
    return _UNKNOWN


def _comparison(tree: Mapping[str, Any], program: Program) -> _Compared | str | None:
    compared = by_layer(tree)
    if compared is None:
        alone = Program()
        measures = condition(Part(tree), alone).measures
        return _UNKNOWN if alone.memories or any(measure.kind == "scalar" for measure in measures) else None
    (own, *sliced), bounds = compared.pop("value"), [*compared.items()]
    of_blocks = [own, *(stage for stage in sliced if not (isinstance(stage, dict) and "slice" in stage))]
    alone = Program()
    value(Part(of_blocks), alone)
    if alone.memories or len(bounds) != 1 or not isinstance(bounds[0][1], int | float) or bounds[0][1] <= 0:
        return _UNKNOWN
    (name, threshold), *_ = bounds
    return _Compared(value(Part(of_blocks), program), float(threshold), name in ("below", "at_most"))


def _distances(tree: _Compared | _Joined, row: Row) -> _Found | None:
    if isinstance(tree, _Compared):
        decades_B = tree.decades_B(row)
        return _Found(decades_B, [tree] * len(decades_B)) if len(decades_B) else None
    found = [_distances(part, row) for part in tree.parts]
    known = [one for one in found if one is not None]
    if not known or (tree.is_all and len(known) < len(found)) or len({len(one.decades_B) for one in known}) > 1:
        return None
    each = np.stack([one.decades_B for one in known])
    # A part that is NaN leaves `all` undefined, and `any` to the other parts.
    order = np.where(np.isnan(each), np.inf, each)
    chosen_B = order.argmax(axis=0) if tree.is_all else order.argmin(axis=0)
    compared_B = [known[chosen].compared_B[block] for block, chosen in enumerate(chosen_B)]
    return _Found(each[chosen_B, range(len(compared_B))], compared_B)
