"""The nodes of values: constants, and the stages that are applied to a value, one after the other."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tsemon_server.rules.columns import Array, Column, Sheet, Sheets, aligned, beside, of_each, spread
from tsemon_server.rules.costs import elementwise
from tsemon_server.rules.memory import (
    MAX_SAMPLES,
    OVER_TIME,
    SORTED_US,
    Best,
    Previous,
    Start,
    Statistic,
    StepsAgo,
    StepsSince,
    Window,
    ZScore,
)
from tsemon_server.rules.parts import Mistake, Part
from tsemon_server.rules.program import Compute, Program, Term, View
from tsemon_server.rules.reductions import Reduction, quantile, reduction, work_of

_OF_NUMBER: dict[str, Callable[[float], Any]] = {
    "abs": abs,
    "negate": lambda x: -x,
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "log10": lambda x: x if x != x else math.log10(max(x, 1e-300)),
    "exp10": lambda x: float(np.power(10.0, np.minimum(x, 300.0))),
    "log_odds": lambda x: float(_log_odds(x)),
}
_OF_ARRAY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "negate": np.negative,
    "sqrt": np.sqrt,
    "log10": lambda x: np.log10(np.maximum(x, 1e-300)),
    "exp10": lambda x: np.power(10.0, np.minimum(x, 300.0)),
    "log_odds": lambda x: _log_odds(x),
}


_PASSES = {
    "log10": 2,
    "exp10": 5,
    "log_odds": 7,
    "plus": 2,
    "minus": 2,
    "times": 2,
    "over": 6,
    "min_with": 5,
    "max_with": 5,
}
"""Operations that cost more than one pass over the values."""
_NUMBER_US = {"exp10": 3.5, "log_odds": 3.5, "min_with": 2.5, "max_with": 2.5}
"""Operations that cost more with one number, because numpy does them."""
_SAYS = {"abs": "|{}|", "negate": "-{}", "log10": "log10 {}", "exp10": "10^({})", "log_odds": "log10 odds of {}"}
_ENCLOSED = "abs", "exp10"


def _log_odds(share: Any) -> Any:
    # Clipped where a share of energy tells nothing more: the rounding of float32, and what independent tokens share.
    share = np.minimum(np.maximum(share, 1e-13), 0.999)
    return np.log10(share / (1 - share))


def named(term: Term, part: Part, program: Program) -> Term:
    """Add the node of a stage that is a single word."""
    if part.data == "skip_frozen":
        return _skip_frozen(term, part, program)
    name = part.one_of([*_OF_NUMBER, "skip_frozen"])
    of_number, of_array, source = _OF_NUMBER[name], _OF_ARRAY[name], term.index

    def compute(views: Sequence[View], columns: list[Any]) -> Column:
        if term.axes:
            return of_each(of_array, columns[source])
        return [of_number(x) for x in columns[source]]

    return program.add(
        f"{term.key} | {name}",
        compute,
        of=[term],
        axes=term.axes,
        says=_SAYS.get(name, f"{name} of {{}}").format(term.says if name in _ENCLOSED else _grouped(term)),
        work=elementwise(term.axes, _PASSES.get(name, 1), _NUMBER_US.get(name, 0)),
    )


def combined(term: Term, name: str, other: Term, part: Part, program: Program) -> Term:
    if term.axes and other.axes and term.axes != other.axes:
        raise part.wrong(f"values with as many axes on both sides, {_AXES[term.axes]} or one number")
    return program.add(
        f"({term.key}) {name} ({other.key})",
        _of_two(term, other, name),
        of=[term, other],
        axes=max(term.axes, other.axes),
        says=f"{_grouped(term)} {_SIGNS[name]} {_grouped(other)}",
        work=elementwise(max(term.axes, other.axes), _PASSES[name], _NUMBER_US.get(name, 0)),
    )


def _of_two(term: Term, other: Term, name: str) -> Compute:
    left, right, of_arrays = term.index, other.index, OF_TWO[name]
    if term.axes and other.axes:
        return lambda views, columns: aligned(of_arrays, columns[left], columns[right])
    if term.axes:
        return lambda views, columns: beside(of_arrays, columns[left], columns[right])
    if other.axes:
        return lambda views, columns: beside(lambda x, y: of_arrays(y, x), columns[right], columns[left])
    of_numbers = _OF_TWO_NUMBERS.get(name, of_arrays)
    return lambda views, columns: [*map(of_numbers, columns[left], columns[right])]


def _grouped(term: Term) -> str:
    """What it says, in parentheses where what follows or precedes would else be read with a part of it alone."""
    depth = 0
    bare = "".join(sign for sign in _without_bars(term.says) if (depth := depth + (sign == "(") - (sign == ")")) == 0)
    return f"({term.says})" if any(f" {sign} " in bare for sign in _SIGNS.values()) else term.says


def _without_bars(says: str) -> str:
    """Without what stands between two of the bars of an absolute value."""
    return "".join(says.split("|")[::2])


def _divided(left: Any, right: Any) -> Any:
    return np.where(np.equal(right, 0), np.nan, np.divide(left, right))


OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "plus": operator.add,
    "minus": operator.sub,
    "times": operator.mul,
    "over": _divided,
    "min_with": np.minimum,
    "max_with": np.maximum,
}
_OF_TWO_NUMBERS: dict[str, Callable[[float, float], float]] = {
    "over": lambda left, right: left / right if right else math.nan,
    "min_with": lambda left, right: float(np.minimum(left, right)),
    "max_with": lambda left, right: float(np.maximum(left, right)),
}
"""Operations that are different for numbers."""
_SIGNS = {"plus": "+", "minus": "-", "times": "×", "over": "/", "min_with": "or, if less,", "max_with": "or, if more,"}
_AXES = {0: "one number", 1: "layers", 2: "blocks and heads"}


def layers(term: Term, part: Part, program: Program) -> Term:
    name = only_key(part)
    if term.axes != 1:
        hint = "; reduce over heads first" if term.axes == 2 else ""
        raise Mistake(part.path, f"{name!r} expects a value with layers, got {_AXES[term.axes]}{hint}")
    reduce, source = reduction(part[name], along=name), term.index

    def compute(views: Sequence[View], columns: list[Any]) -> Column:
        sheets = columns[source]
        return spread(sheets, [reduce(sheet) for sheet in sheets], math.nan, len(views))

    return program.add(
        f"{term.key} | layers {_key(part[name])}",
        compute,
        of=[term],
        axes=0,
        says=_over_layers(part[name], _grouped(term)),
        work=work_of(part[name], of_axes=1),
    )


def _over_layers(part: Part, says: str) -> str:
    word = _short(part)
    if word in ("first", "last"):
        return f"{says} of the {word} layer"
    if word.startswith("first_above "):
        return f"first layer with {says} above {word.partition(' ')[2]}"
    named = {"slope": "slope over depth", "r_squared": "r² of the slope over depth", "fall": "fall over depth"}
    named["fall_r_squared"] = "r² of the fall over depth"
    return f"{named[word]} of {says}" if word in named else f"{says} ({word} of layers)"


def heads(term: Term, part: Part, program: Program) -> Term:
    name = only_key(part)
    if term.axes != 2:
        raise Mistake(part.path, f"{name!r} expects a value with heads, got {_AXES[term.axes]}")
    reduce, source = reduction(part[name], along=name), term.index

    def compute(views: Sequence[View], columns: list[Any]) -> Sheets:
        return [_of_heads(reduce, sheet) for sheet in columns[source]]

    key, says = f"{term.key} | heads {_key(part[name])}", f"{_grouped(term)} ({_short(part[name])} of heads)"
    return program.add(key, compute, of=[term], axes=1, says=says, work=work_of(part[name], of_axes=2))


def _of_heads(reduce: Reduction, sheet: Sheet) -> Sheet:
    num_rows, num_blocks, num_heads = sheet.values.shape
    each_block = Sheet(range(num_rows * num_blocks), sheet.values.reshape(-1, num_heads))
    return Sheet(sheet.rows, np.array(reduce(each_block)).reshape(num_rows, num_blocks))


def sliced(term: Term, part: Part, program: Program) -> Term:
    ends = list(part.has_keys(["slice"])["slice"].items())
    needs_layers(term, part)
    if len(ends) != 2:
        raise part["slice"].wrong("the first layer and the one after the last, such as [1, null]")
    span = slice(*(None if end.data is None else end.whole(-10_000, 10_000) for end in ends))
    source = term.index

    def compute(views: Sequence[View], columns: list[Any]) -> Sheets:
        cut = of_each(lambda values: values[:, span], columns[source])
        return [sheet for sheet in cut if sheet.values.size]

    key = f"{term.key} | slice {span.start} {span.stop}"
    work = elementwise(term.axes, 1)
    return program.add(key, compute, of=[term], axes=term.axes, says=term.says, work=work, cut=span)


def _skip_frozen(term: Term, part: Part, program: Program) -> Term:
    needs_layers(term, part)
    source = term.index

    def compute(views: Sequence[View], columns: list[Any]) -> Sheets:
        if not any(view.frozen for view in views):
            sheets: Sheets = columns[source]
            return sheets
        return [_without_frozen(sheet, views) for sheet in columns[source]]

    work = elementwise(term.axes, 4)
    return program.add(f"{term.key} | skip_frozen", compute, of=[term], axes=term.axes, says=term.says, work=work)


def _without_frozen(sheet: Sheet, views: Sequence[View]) -> Sheet:
    kept = sheet.values.copy()
    for values, row in zip(kept, sheet.rows, strict=True):
        values[[block for block in views[row].frozen if 0 <= block < len(values)]] = np.nan
    return Sheet(sheet.rows, kept)


def kept_where(term: Term, mask: Term, program: Program) -> Term:
    source, condition = term.index, mask.index
    return program.add(
        f"{term.key} | where ({mask.key})",
        lambda views, columns: aligned(_kept_where, columns[source], columns[condition]),
        of=[term, mask],
        axes=term.axes,
        says=f"{_grouped(term)} where {mask.says}",
        work=elementwise(term.axes, 6),
    )


def _kept_where(values: Array, holds: Array) -> Array:
    return np.where(holds == 1, values, np.nan)


def needs_layers(term: Term, part: Part) -> None:
    if not term.axes:
        raise Mistake(part.path, "this stage expects a value with layers, got one number")


def window(term: Term, part: Part, program: Program) -> Term:
    part.has_keys(["window", "samples"])
    num_samples = part["samples"].whole(2, MAX_SAMPLES)
    take, says = _over_time(part["window"])
    return program.remember(
        term,
        f"window {_key(part)}",
        Window(take, num_samples),
        says=f"{says} of the last {num_samples} samples of {_grouped(term)}",
    )


def start(term: Term, part: Part, program: Program) -> Term:
    part.has_keys(["start"], ["samples"])
    num_samples = part["samples"].whole(1, MAX_SAMPLES) if "samples" in part else 3
    take, name = _over_time(part["start"])
    x = _grouped(term)
    if num_samples == 1:
        says = f"the first {x}"
    else:
        says = f"{x} at its start" if name == "median" else f"{name} of the first {num_samples} samples of {x}"
    return program.remember(term, f"start {_key(part)}", Start(take, num_samples), says=says)


def _over_time(part: Part) -> tuple[Statistic, str]:
    if isinstance(part.data, dict):
        share = part.has_keys(["quantile"])["quantile"].share()
        return Statistic(lambda values, _: quantile(values, share), SORTED_US), f"quantile {share:g}"
    return OVER_TIME[part.one_of(list(OVER_TIME))], str(part.data)


def best(term: Term, part: Part, program: Program) -> Term:
    end = part.has_keys(["best"])["best"].one_of(_ENDS)
    return program.remember(term, f"best {end}", Best(end == "lowest"), says=f"the {end} {_grouped(term)} so far")


def z_score(term: Term, part: Part, program: Program) -> Term:
    num_samples = part.has_keys(["z_score"])["z_score"].whole(3, MAX_SAMPLES)
    says = f"standard deviations of {_grouped(term)} off the {num_samples} samples before"
    return program.remember(term, f"z_score {num_samples}", ZScore(num_samples), says=says)


def previous(term: Term, part: Part, program: Program) -> Term:
    distance = part.has_keys(["previous"])["previous"]
    if isinstance(distance.data, dict):
        num_steps = distance.has_keys(["steps"])["steps"].whole(1, MAX_SAMPLES)
        says = f"{_grouped(term)} {num_steps} steps ago or more"
        return program.remember(term, f"previous {num_steps} steps", StepsAgo(num_steps), says=says)
    num_samples = distance.whole(1, MAX_SAMPLES)
    samples = "sample" if num_samples == 1 else "samples"
    says = f"{_grouped(term)} {num_samples} {samples} ago"
    return program.remember(term, f"previous {num_samples}", Previous(num_samples), says=says)


def steps_since(term: Term, part: Part, program: Program) -> Term:
    end = part.has_keys(["steps_since"], ["by"])["steps_since"].one_of(_ENDS)
    by_ratio = part["by"].share() if "by" in part else 0.0
    says = f"steps since {_grouped(term)} was last {end} by {by_ratio:.1%}"
    return program.remember(term, f"steps_since {_key(part)}", StepsSince(end == "lowest", by_ratio), says=says)


_ENDS = "lowest", "highest"


def only_key(part: Part) -> str:
    key = str(next(iter(part.data)))
    part.has_keys([key])
    return key


def _key(part: Part) -> str:
    return json.dumps(part.data, sort_keys=True)


def _short(part: Part) -> str:
    if isinstance(part.data, dict):
        name, number = next(iter(part.data.items()))
        return f"{name} {number:g}"
    return str(part.data)
