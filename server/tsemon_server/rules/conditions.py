"""The nodes of conditions: comparisons, and what joins them. A comparison with a value that was not measured is unknown,
and `all`, `any` and `not` pass that on (Kleene).

A node of a condition gives True, False or None; a mask, which is a comparison layer by layer, gives 1, 0 or NaN.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsemon_server.rules.columns import Answers, Array, Numbers, Sheets, aligned, beside, of_each, spread
from tsemon_server.rules.costs import Work, elementwise
from tsemon_server.rules.memory import HowOften
from tsemon_server.rules.parts import Part
from tsemon_server.rules.program import Compute, Needs, Program, Term, View, bounded

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
    def compute(views: Sequence[View], columns: list[Any]) -> Answers:
        return [None if answer is None else not answer for answer in columns[term.index]]

    key, says = f"not ({term.key})", f"not {term.says}"
    return program.add(key, compute, of=[term], axes=0, says=says, work=elementwise(0, 1), needs="none")


def joined(terms: Sequence[Term], name: str, program: Program) -> Term:
    indices, decisive, other = [term.index for term in terms], name == "any", name != "any"

    def compute(views: Sequence[View], columns: list[Any]) -> Answers:
        each = zip(*[columns[index] for index in indices], strict=True)
        return [decisive if decisive in row else None if None in row else other for row in each]

    word = " and " if name == "all" else " or "
    key, says = f"{name} [{'; '.join(term.key for term in terms)}]", word.join(term.says for term in terms)
    work = Work(0.5 + 0.1 * len(terms))
    return program.add(key, compute, of=terms, axes=0, says=says, work=work, needs="one" if name == "any" else "all")


def repeated(term: Term, num_samples: int, least: int, program: Program) -> Term:
    how_often = program.remember(term, f"in the last {num_samples}", HowOften(num_samples), says=term.says)

    def compute(views: Sequence[View], columns: list[Any]) -> Answers:
        return [None if times != times else times >= least for times in columns[how_often.index]]

    says = f"{term.says} in {least} of {num_samples} samples"
    key = f"{how_often.key} at least {least}"
    return program.add(key, compute, of=[how_often], axes=0, says=says, work=elementwise(0, 1))


# Comparisons


def held_against(value: Term, bounds: Sequence[Bound], program: Program) -> Term:
    """An answer for one number, or a mask for layers."""
    of, says = [value, *(bound for _, bound in bounds)], _says(value, bounds)
    compute = _mask(value, bounds) if value.axes else _answers(value, bounds)
    reads = of if value.axes else _read(value, bounds)
    work = elementwise(value.axes, 2 + 9 * len(bounds)) if value.axes else elementwise(0, 2 * len(bounds))
    return program.add(_key(value, bounds), compute, of=of, reads=reads, axes=value.axes, says=says, work=work)


def _key(value: Term, bounds: Sequence[Bound]) -> str:
    return f"{value.key} " + " ".join(f"{name} ({bound.key})" for name, bound in bounds)


def _says(value: Term, bounds: Sequence[Bound]) -> str:
    return value.says + " " + " and ".join(f"{name.replace('_', ' ')} {bound.says}" for name, bound in bounds)


def _read(value: Term, bounds: Sequence[Bound]) -> list[Term]:
    """Whose columns `_answer` needs: a bound that is a constant it knows."""
    return [value, *(bound for _, bound in bounds if bound.number is None)]


def _answers(value: Term, bounds: Sequence[Bound]) -> Compute:
    """Numbers held against bounds, row by row."""
    if len(bounds) == 1:
        return _answer(value.index, *bounds[0])
    tests = [_answer(value.index, *bound) for bound in bounds]

    def compute(views: Sequence[View], columns: list[Any]) -> Answers:
        each = [test(views, columns) for test in tests]
        return [None if None in row else all(row) for row in zip(*each, strict=True)]

    return compute


def _answer(source: int, name: str, bound: Term) -> Compute:
    """Numbers held against one bound."""
    test, limit, index = BOUNDS[name], bound.number, bound.index
    if limit is not None:
        return lambda views, columns: [None if x != x else test(x, limit) for x in columns[source]]
    return lambda views, columns: [
        None if x != x or at != at else test(x, at) for x, at in zip(columns[source], columns[index], strict=True)
    ]


def _mask(value: Term, bounds: Sequence[Bound]) -> Compute:
    def compute(views: Sequence[View], columns: list[Any]) -> Sheets:
        values: Sheets = columns[value.index]
        masks = of_each(lambda x: np.where(np.isnan(x), np.nan, 1.0), values)
        for name, bound in bounds:
            hold = aligned if bound.axes else beside
            masks = aligned(np.multiply, masks, hold(_tested(name), values, columns[bound.index]))
        return masks

    return compute


def _tested(name: str) -> Callable[[Array, Array], Array]:
    test = BOUNDS[name]
    return lambda x, limit: np.where(np.isnan(limit), np.nan, test(x, limit))


def of_kind(part: Part, value: Term, program: Program) -> Term:
    kind, source = part.one_of(KINDS), value.index
    is_of_kind, name = _OF_KIND[kind], value.key.removeprefix("scalar:")

    def layers(views: Sequence[View], columns: list[Any]) -> Sheets:
        return of_each(lambda values: is_of_kind(values).astype(float), columns[source])

    def numbers(views: Sequence[View], columns: list[Any]) -> Answers:
        # A name that is in the frame with NaN was computed, and is not finite. Of what is made of it NaN may be a hole.
        is_given = [name in view.scalars or x == x for view, x in zip(views, columns[source], strict=True)]
        if kind == "measured":
            return [*is_given]
        is_finite = kind == "finite"
        given = zip(is_given, columns[source], strict=True)
        return [(math.isfinite(x) is is_finite) if is_there else None for is_there, x in given]

    compute: Compute = layers if value.axes else numbers
    key, says, work = f"{value.key} is {kind}", f"{value.says} is {kind}", elementwise(value.axes, 3)
    needs: Needs = "none" if value.axes else "all"
    return program.add(key, compute, of=[value], axes=value.axes, says=says, work=work, needs=needs)


_OF_KIND: dict[str, Callable[[Array], NDArray[np.bool_]]] = {
    "measured": lambda values: ~np.isnan(values),
    "finite": np.isfinite,
    "nonfinite": lambda values: ~np.isfinite(values),
}

# Layers


def held_in(part: Part, value: Term, bounds: Sequence[Bound], program: Program) -> Term:
    """A comparison of layers with the layers in which it must hold."""
    if part.data not in ("any", "all") or len(bounds) > 1 or bounds[0][1].axes:
        return in_layers(part, held_against(value, bounds, program), program)
    # It holds in any layer if it holds in the one that is farthest to its side, and in all if in the other one.
    is_low = bounds[0][0] in ("below", "at_most")
    farthest = _known_end(value, 0 if is_low is (part.data == "any") else 1, program)
    reads, compute = _read(farthest, bounds), _answers(farthest, bounds)
    key, says, work = _key(value, bounds), _says(value, bounds), elementwise(0, 2)
    return _in(part, key, says, [value, bounds[0][1]], reads, compute, program, work)


def _known_end(value: Term, end: int, program: Program) -> Term:
    """The lowest (0) or highest (1) of the layers that are not NaN."""

    def compute(views: Sequence[View], columns: list[Any]) -> Numbers:
        sheets: Sheets = columns[value.index]
        return spread(sheets, [sheet.known_ends[end] for sheet in sheets], math.nan, len(views))

    return program.add(f"{value.key} | known end {end}", compute, of=[value], axes=0, says=value.says, work=_ENDS)


_ENDS = Work(12)
_COUNTED = Work(20)


def in_layers(part: Part, mask: Term, program: Program) -> Term:
    decide, source = _decision(part), mask.index

    def compute(views: Sequence[View], columns: list[Any]) -> Answers:
        sheets: Sheets = columns[source]
        return spread(sheets, [decide(sheet.values) for sheet in sheets], None, len(views))

    return _in(part, mask.key, mask.says, [mask], [mask], compute, program, _COUNTED)


def _in(
    part: Part,
    key: str,
    says: str,
    of: Sequence[Term],
    reads: Sequence[Term],
    compute: Compute,
    program: Program,
    work: Work,
) -> Term:
    key, says = f"{bounded(key)} in {json.dumps(part.data)}", f"{says} in {_quantifier(part)}"
    return program.add(key, compute, of=of, reads=reads, axes=0, says=says, work=work)


def _quantifier(part: Part) -> str:
    if not isinstance(part.data, dict):
        name = part.one_of(["any", "all", "first", "last"])
        return f"{name} layer{'s' if name == 'all' else ''}" if name in ("any", "all") else f"the {name} layer"
    if "layers" in part:
        return f"at least {part['layers'].whole(1, 10_000)} layers"
    return f"at least {part['share'].share():.0%} of layers"


def _decision(part: Part) -> Callable[[Array], Answers]:
    """From a mask of (rows, layers) to an answer for each row."""
    if isinstance(part.data, dict):
        if "layers" in part:
            least = part.has_keys(["layers"])["layers"].whole(1, 10_000)
            return lambda masks: [None if not known else holds >= least for holds, known in _counts(masks)]
        share = part.has_keys(["share"])["share"].share()
        return lambda masks: [None if not known else holds >= share * known for holds, known in _counts(masks)]
    name = part.one_of(["any", "all", "first", "last"])
    if name in ("first", "last"):
        place = 0 if name == "first" else -1
        return lambda masks: [None if holds != holds else holds == 1 for holds in masks[:, place].tolist()]
    return lambda masks: [
        None if not known else holds >= (1 if name == "any" else known) for holds, known in _counts(masks)
    ]


def _counts(masks: Array) -> Iterator[tuple[int, int]]:
    """In how many layers it holds, and how many were measured, for each row."""
    holds, known = np.count_nonzero(masks == 1, axis=1), np.count_nonzero(masks == masks, axis=1)
    return zip(holds.tolist(), known.tolist(), strict=True)
