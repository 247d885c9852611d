"""Conditions that can never hold, or never change: mistakes that would pass for rules that see nothing wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tsemon.catalogue import SCALARS
from tsemon_server.rules.conditions import BOUNDS
from tsemon_server.rules.line import ON_CLOCK
from tsemon_server.rules.parts import Mistake, Path
from tsemon_server.rules.printing import condition
from tsemon_server.rules.program import Measure
from tsemon_server.rules.values import OF_TWO

_LOW, _HIGH = ("above", "at_least"), ("below", "at_most")
_STRICT = "above", "below"
_NO_FRAME = {*ON_CLOCK} - {*SCALARS}


def check_measures(path: Path, measures: frozenset[Measure], on: str) -> None:
    """Raise Mistake if a condition reads a metric that is missing when it is evaluated, in a frame or by the clock."""
    for measure in sorted(measures):
        if on == "clock" and measure not in _OF_CLOCK:
            raise Mistake(
                path,
                f"a time-based rule (`on: clock`) cannot read {measure.name!r}; it reads only {', '.join(ON_CLOCK)}. "
                "Leave out `on` to evaluate the rule at each frame",
            )
        if on == "frame" and measure.kind == "scalar" and measure.name in _NO_FRAME:
            raise Mistake(path, f"no frame has {measure.name!r}, which the server measures itself; add `on: clock`")


_OF_CLOCK = {Measure("scalar", name) for name in ON_CLOCK}


def check(tree: Mapping[str, Any], path: Path) -> None:
    """Raise Mistake if a part of a condition, which can be compiled, never holds or never changes."""
    for joined in _conditions(tree):
        for compared in _joined(joined):
            _check_range(compared, joined, path)
        if "value" not in joined:
            continue
        values = [joined["value"], *(joined[name] for name in BOUNDS if name in joined)]
        if not any(map(_reads, values)):
            raise Mistake(path, f"{_text(joined)}: it reads no metric, so its answer never changes")
        if any(map(_divides_by_zero, values)):
            raise Mistake(path, f"{_text(joined)}: it divides by 0, which is undefined, so it can never hold")


def _conditions(tree: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """This condition and all inside of it."""
    yield tree
    for name in ("all", "any"):
        for item in tree.get(name, ()):
            yield from _conditions(item)
    for name in ("not", "condition"):
        if name in tree:
            yield from _conditions(tree[name])
    for name in ("value", *BOUNDS):
        for inner in _inside(tree.get(name, 0)):
            yield from _conditions(inner)


def _inside(value: Any) -> Iterator[Mapping[str, Any]]:
    """The conditions in a value."""
    for stage in value if isinstance(value, list) else ():
        if isinstance(stage, list):
            yield from _inside(stage)
        elif isinstance(stage, dict):
            yield from (stage[name] for name in ("steps_in", "where") if name in stage)
            for name in OF_TWO:
                yield from _inside(stage.get(name, 0))


def _reads(value: Any) -> bool:
    """Whether a value depends on a frame."""
    if not isinstance(value, list):
        return False
    source, *stages = value
    operands = [stage[name] for stage in stages if isinstance(stage, dict) for name in OF_TWO if name in stage]
    return isinstance(source, dict) or _reads(source) or any(map(_reads, operands))


def _divides_by_zero(value: Any) -> bool:
    parts = value if isinstance(value, list) else ()
    operands = [(name, part[name]) for part in parts if isinstance(part, dict) for name in OF_TWO if name in part]
    inner = [operand for _, operand in operands] + [part for part in parts if isinstance(part, list)]
    return any(name == "over" and operand == 0 for name, operand in operands) or any(map(_divides_by_zero, inner))


def _joined(tree: Mapping[str, Any]) -> list[Sequence[Mapping[str, Any]]]:
    """Comparisons of one number that must hold together."""
    if "value" in tree:
        return [[tree]]
    same: dict[str, list[Mapping[str, Any]]] = {}
    for item in tree.get("all", ()):
        if "value" in item and "in" not in item:
            same.setdefault(json.dumps(item["value"]), []).append(item)
    return [*same.values()]


def _check_range(compared: Sequence[Mapping[str, Any]], shown: Mapping[str, Any], path: Path) -> None:
    bounds = [(name, one[name]) for one in compared for name in BOUNDS if isinstance(one.get(name), int | float)]
    for low, least in bounds:
        for high, most in bounds:
            is_strict = low in _STRICT or high in _STRICT
            if low in _LOW and high in _HIGH and (least > most or (least == most and is_strict)):
                said = f"{low.replace('_', ' ')} {least:g} and {high.replace('_', ' ')} {most:g}"
                raise Mistake(path, f"{_text(shown)}: it can never hold, because no number is {said}")


def _text(tree: Mapping[str, Any]) -> str:
    text = condition(tree)
    return text if len(text) <= 80 else f"{text[:77]}..."
