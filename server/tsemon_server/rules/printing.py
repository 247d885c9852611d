"""A tree as the line that says the same: `line` reads it back as the tree."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tsemon_server.rules.line import KNOWN

_SIGNS = {"plus": "+", "minus": "-", "times": "*", "over": "/"}
_BOUNDS = {"above": (">", "<"), "below": ("<", ">"), "at_least": (">=", "<="), "at_most": ("<=", ">=")}
"""The sign after the value, and before it."""
_OR, _AND, _NOT, _COMPARED, _SUM, _PRODUCT, _NEGATED, _ATOM = range(8)


class _Printed(NamedTuple):
    text: str
    binds: int
    """How tightly: an operator puts what binds less tightly in parentheses."""

    def within(self, binds: int) -> str:
        return self.text if self.binds >= binds else f"({self.text})"


def condition(tree: Mapping[str, Any]) -> str:
    """The line of a condition that can be compiled."""
    return _condition(tree).text


def value(tree: Any) -> str:
    """The line of a value that can be compiled."""
    return _value(tree).text


def lasting(samples_and_steps: Mapping[str, int]) -> str:
    """The text after `for` or `after`: 4 samples, 20 steps."""
    told = ((unit, num) for unit, num in samples_and_steps.items() if num or len(samples_and_steps) == 1)
    return ", ".join(f"{num:g} {unit[:-1] if num == 1 else unit}" for unit, num in told)


def _condition(tree: Mapping[str, Any]) -> _Printed:
    if "value" in tree:
        return _comparison(tree)
    if "condition" in tree:
        return _call("held", condition(tree["condition"]), str(tree["at_least"]), f"of={tree['in_last']}")
    if "not" in tree:
        return _Printed(f"not {_condition(tree['not']).within(_NOT)}", _NOT)
    ((name, items),) = tree.items()
    if len(items) == 1:
        return _call(name, condition(items[0]))
    word, binds = (" and ", _AND) if name == "all" else (" or ", _OR)
    # `and` within `or` needs no parentheses, but readers do.
    return _Printed(word.join(_condition(item).within(_NOT) for item in items), binds)


def _comparison(tree: Mapping[str, Any]) -> _Printed:
    if "is" in tree:
        compared = _call(tree["is"], value(tree["value"]))
    else:
        compared = _bounded(tree["value"], {name: tree[name] for name in _BOUNDS if name in tree})
    if "in" not in tree:
        return compared
    if isinstance(tree["in"], str):
        return _call(tree["in"], compared.text)
    ((name, number),) = tree["in"].items()
    return _call("any", compared.text, f"{name}={_number(number)}")


def _bounded(compared: Any, bounds: Mapping[str, Any]) -> _Printed:
    printed = {name: _value(bound) for name, bound in bounds.items()}
    is_turned = len(bounds) == 1 and _number_of(compared) is not None and _number_of(*bounds.values()) is None
    if len(bounds) > 2 or is_turned:
        return _call("between", value(compared), *(f"{name}={bound.text}" for name, bound in printed.items()))
    *first, (name, last) = printed.items()
    text = f"{_value(compared).within(_SUM)} {_BOUNDS[name][0]} {last.within(_SUM)}"
    for name, bound in first:
        text = f"{bound.within(_SUM)} {_BOUNDS[name][1]} {text}"
    return _Printed(text, _COMPARED)


def _value(tree: Any) -> _Printed:
    if not isinstance(tree, list):
        return _Printed(_number(tree), _NEGATED if tree < 0 else _ATOM)
    source, *stages = tree
    printed, number = _source(source), _number_of(source)
    for stage in stages:
        printed = _staged(printed, stage if number is None else _without_own(stage, number), number is not None)
        number = None
    return printed


def _number_of(tree: Any) -> float | None:
    """The number, if the tree is printed as nothing but a number."""
    if isinstance(tree, list):
        return _number_of(tree[0]) if len(tree) == 1 else None
    return tree if isinstance(tree, int | float) else None


def _without_own(stage: Any, number: float) -> Any:
    """The stage with the number where it names `own`, which in a line stands for metrics only."""
    if not isinstance(stage, dict):
        return stage
    return {
        name: [number, *what[1:]] if isinstance(what, list) and what[0] == "own" else what
        for name, what in stage.items()
    }


def _source(source: Any) -> _Printed:
    if source == "own":
        return _Printed("own", _ATOM)
    if not isinstance(source, dict):
        return _value(source)
    ((kind, name),) = source.items()
    if kind == "steps_in":
        return _call("steps_in", condition(name))
    return _Printed(name, _ATOM) if KNOWN.get(name) == kind else _call(kind, json.dumps(name, ensure_ascii=False))


def _staged(x: _Printed, stage: Any, is_number: bool) -> _Printed:
    if stage == "negate" and not is_number:
        return _Printed(f"-{x.within(_NEGATED)}", _NEGATED)
    if isinstance(stage, str):
        return _call(stage, x.text)
    name = next(iter(stage.keys() & _NAMED.keys() | stage.keys() & _SIGNS.keys()))
    if name in _SIGNS:
        binds = _SUM if name in ("plus", "minus") else _PRODUCT
        return _Printed(f"{x.within(binds)} {_SIGNS[name]} {_value(stage[name]).within(binds + 1)}", binds)
    return _NAMED[name](x.text, stage)


def _call(name: str, *arguments: str) -> _Printed:
    return _Printed(f"{name}({', '.join(arguments)})", _ATOM)


def _reduced(x: str, how: Any, along: str) -> _Printed:
    if isinstance(how, str):
        return _call("fit" if how == "fall_r_squared" else how, x)
    ((name, number),) = how.items()
    return _call(along if name == "index" else name, x, _number(number))


def _window(x: str, stage: Mapping[str, Any]) -> _Printed:
    how, samples = stage["window"], f"samples={_number(stage['samples'])}"
    if isinstance(how, str):
        return _call(how, x, samples)
    return _call("quantile", x, _number(how["quantile"]), samples)


def _start(x: str, stage: Mapping[str, Any]) -> _Printed:
    how, more = stage["start"], [f"samples={_number(stage['samples'])}"] if "samples" in stage else []
    if not isinstance(how, str):
        more.append(f"quantile={_number(how['quantile'])}")
    elif how != "median":
        more.append(f'take="{how}"')
    return _call("start", x, *more)


def _steps_since(x: str, stage: Mapping[str, Any]) -> _Printed:
    return _call(f"steps_since_{stage['steps_since']}", x, *([f"by={_number(stage['by'])}"] if "by" in stage else []))


def _slice(x: str, stage: Mapping[str, Any]) -> _Printed:
    start, end = stage["slice"]
    ends = [start] if end is None else [start, end]
    return _call("slice", x, *("None" if place is None else _number(place) for place in ends))


def _previous(x: str, stage: Mapping[str, Any]) -> _Printed:
    if isinstance(stage["previous"], Mapping):
        return _call("previous", x, f"steps={_number(stage['previous']['steps'])}")
    is_one = stage["previous"] == 1 and isinstance(stage["previous"], int)
    return _call("previous", x, *([] if is_one else [_number(stage["previous"])]))


_NAMED = {
    "heads": lambda x, stage: _reduced(x, stage["heads"], "head"),
    "layers": lambda x, stage: _reduced(x, stage["layers"], "layer"),
    "slice": _slice,
    "where": lambda x, stage: _call("where", x, condition(stage["where"])),
    "min_with": lambda x, stage: _call("min", x, value(stage["min_with"])),
    "max_with": lambda x, stage: _call("max", x, value(stage["max_with"])),
    "window": _window,
    "start": _start,
    "best": lambda x, stage: _call(stage["best"], x),
    "z_score": lambda x, stage: _call("z_score", x, _number(stage["z_score"])),
    "previous": _previous,
    "steps_since": _steps_since,
}


def _number(number: float) -> str:
    """As short as it can be, and the same number: 1e-8 instead of 1e-08, 4e-4 instead of 0.0004."""
    plain = re.sub(r"e([+-]?)0*(?=\d)", lambda found: "e" + found[1].replace("+", ""), repr(number))
    if not isinstance(number, float) or "e" in plain or not 0 < abs(number) < 1:
        return plain
    digits = plain.lstrip("-0.")
    exponent = plain.partition(".")[2].index(digits[0]) + 1
    short = f"{'-' if number < 0 else ''}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e-{exponent}"
    return min(plain, short, key=len)
