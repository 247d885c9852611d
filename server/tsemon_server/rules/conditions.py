"""The nodes of conditions: comparisons, and what joins them. A comparison with a value that was not measured is unknown,
and `all`, `any` and `not` pass that on (Kleene).

A node of a condition gives True, False or None; a mask, which is a comparison layer by layer, gives 1, 0 or NaN.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsemon_server.rules.memory import HowOften
from tsemon_server.rules.parts import Part
from tsemon_server.rules.program import Program, Slots, Term, View
from tsemon_server.rules.reductions import Array
from tsemon_server.rules.values import aligned

Answer = bool | None
Bound = tuple[str, Term]

BOUNDS: dict[str, Callable[[Any, Any], Any]] = {
    "above": operator.gt,
    "below": operator.lt,
    "at_least": operator.ge,
    "at_most": operator.le,
}
KINDS = "nonfinite", "finite", "measured"


@dataclass(frozen=True)
class Comparison:
    """A value held against bounds: what an alert shows of a condition."""

    value: Term
    bounds: tuple[Bound, ...]
    holds: Term
    layers: Any = None
    """In which layers it must hold, as the tree of the rule has it after `in`; None for one number."""


def negated(term: Term, program: Program) -> Term:
    def compute(view: View, slots: Slots) -> Answer:
        answer: Answer = slots[term.index]
        return None if answer is None else not answer

    return program.add(f"not ({term.key})", compute, of=[term], axes=0, says=f"not {term.says}")


def joined(terms: Sequence[Term], name: str, program: Program) -> Term:
    indices, decisive = [term.index for term in terms], name == "any"

    def compute(view: View, slots: Slots) -> Answer:
        is_known = True
        for index in indices:
            answer: Answer = slots[index]
            if answer is decisive:
                return decisive
            is_known = is_known and answer is not None
        return not decisive if is_known else None

    word = " and " if name == "all" else " or "
    key, says = f"{name} [{'; '.join(term.key for term in terms)}]", word.join(term.says for term in terms)
    return program.add(key, compute, of=terms, axes=0, says=says)


def repeated(term: Term, num_samples: int, least: int, program: Program) -> Term:
    how_often = program.remember(term, f"in the last {num_samples}", HowOften(num_samples), says=term.says)

    def compute(view: View, slots: Slots) -> Answer:
        times = slots[how_often.index]
        return None if math.isnan(times) else bool(times >= least)

    says = f"{term.says} in {least} of {num_samples} samples"
    return program.add(f"{how_often.key} at least {least}", compute, of=[term], axes=0, says=says)


# Comparisons


def held_against(value: Term, bounds: Sequence[Bound], program: Program) -> Term:
    tests = [(BOUNDS[name], bound.index) for name, bound in bounds]
    source = value.index

    def number(view: View, slots: Slots) -> Answer:
        x, holds = slots[source], True
        for test, index in tests:
            limit = slots[index]
            if limit != limit:
                return None
            holds = holds and test(x, limit)
        # Of NumPy's numbers `holds` is no bool, and answers are told apart by identity.
        return None if x != x else bool(holds)

    def layers(view: View, slots: Slots) -> Array:
        x = slots[source]
        holds = np.where(np.isnan(x), np.nan, 1.0)
        for test, index in tests:
            limit = slots[index]
            if isinstance(limit, np.ndarray):
                holds = aligned(np.multiply, holds, _answers(test, x, limit))
            else:
                holds *= test(x, limit) if limit == limit else np.nan
        return holds

    says = value.says + " " + " and ".join(f"{name.replace('_', ' ')} {bound.says}" for name, bound in bounds)
    key = f"{value.key} " + " ".join(f"{name} ({bound.key})" for name, bound in bounds)
    of = [value, *(bound for _, bound in bounds)]
    return program.add(key, layers if value.axes else number, of=of, axes=value.axes, says=says)


def _answers(test: Callable[[Any, Any], Any], x: Array, limit: Array) -> Array:
    answers: Array = aligned(lambda x, limit: np.where(np.isnan(limit), np.nan, test(x, limit)), x, limit)
    return answers


def of_kind(part: Part, value: Term, program: Program) -> Term:
    kind, source = part.one_of(KINDS), value.index

    def layers(view: View, slots: Slots) -> Array:
        answers: Array = _is_of_kind(kind, slots[source]).astype(float)
        return answers

    def number(view: View, slots: Slots) -> Answer:
        is_given = _is_given(value, view, slots[source])
        if kind == "measured":
            return is_given
        return bool(_is_of_kind(kind, slots[source])) if is_given else None

    says = f"{value.says} is {kind}"
    return program.add(
        f"{value.key} is {kind}", layers if value.axes else number, of=[value], axes=value.axes, says=says
    )


def _is_given(value: Term, view: View, x: float) -> bool:
    """A name that is in the frame with NaN was computed, and is not finite. Of what is made of it NaN may be a hole."""
    return value.key.removeprefix("scalar:") in view.scalars or x == x


def _is_of_kind(kind: str, x: Any) -> Any:
    if kind == "measured":
        return ~np.isnan(x)
    return np.isfinite(x) if kind == "finite" else ~np.isfinite(x)


def in_layers(part: Part, mask: Term, program: Program) -> Term:
    decide, says = _quantifier(part)
    source = mask.index

    def compute(view: View, slots: Slots) -> Answer:
        holds = slots[source]
        return decide(holds) if len(holds) else None

    key = f"{mask.key} in {json.dumps(part.data)}"
    return program.add(key, compute, of=[mask], axes=0, says=f"{mask.says} in {says}")


def _quantifier(part: Part) -> tuple[Callable[[Array], Answer], str]:
    if isinstance(part.data, dict):
        if "layers" in part:
            least = part.has_keys(["layers"])["layers"].whole(1, 10_000)
            return lambda holds: _counted(holds, least), f"at least {least} layers"
        share = part.has_keys(["share"])["share"].share()
        return lambda holds: _counted(
            holds, share * np.count_nonzero(~np.isnan(holds))
        ), f"at least {share:.0%} of layers"
    name = part.one_of(["any", "all", "first", "last"])
    if name in ("first", "last"):
        place = 0 if name == "first" else -1
        return lambda holds: None if math.isnan(holds[place]) else bool(holds[place]), f"the {name} layer"
    if name == "any":
        return lambda holds: _counted(holds, 1), "any layer"
    return lambda holds: _counted(holds, float(np.count_nonzero(~np.isnan(holds)))), "all layers"


def _counted(holds: Array, least: float) -> Answer:
    """Of the layers that were measured."""
    known = holds[~np.isnan(holds)]
    return bool(known.sum() >= least) if len(known) else None
