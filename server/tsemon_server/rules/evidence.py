"""The evidence of an alert: the values, their thresholds, their layers and their last samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tsemon_server.rules.columns import Array
from tsemon_server.rules.conditions import BOUNDS, Comparison
from tsemon_server.rules.engine import Change
from tsemon_server.rules.heads import SIGNS, head_of
from tsemon_server.rules.plan import Row
from tsemon_server.rules.program import Measure, Term, View
from tsemon_server.rules.recent import SHOWN_SAMPLES
from tsemon_server.rules.rule import Compiled


def evidence(
    compiled: Compiled,
    change: Change,
    view: View,
    values: Row,
    window: Mapping[str, Sequence[float]],
    also: list[str],
    blocks: tuple[int, int] | None,
) -> dict[str, Any]:
    """All that is known of one change, as plain JSON; what is not finite is null."""
    measures = sorted(compiled.measures)
    layered = sorted(m for m in compiled.measures | compiled.where.measures if m.kind != "scalar")
    rows = _window(window)
    return {
        "step": view.step,
        "left_step": change.left_step,
        "blocks": blocks,
        "where": None if blocks is None else view.in_words(*blocks),
        "head": None if blocks is None else _head(compiled, blocks[0], view),
        **({"stack": view.stack_name} if view.stack_name is not None and view.has(blocks) else {}),
        "conditions": [_held(comparison, values, view, _names(compiled)) for comparison in compiled.comparisons],
        "layers": {m.name: _profile(m, view) for m in layered},
        "numbers": numbers(compiled, values),
        "held": {"since_step": change.since_step, "samples": change.samples, "steps": view.step - change.since_step},
        "window": rows,
        "also_firing": also,
        "not_measured": [measure.name for measure in measures if measure.of(view) is None],
    }


def where(view: View, blocks: tuple[int, int] | None, left_step: int) -> dict[str, str | None]:
    """The block, the blocks and the step that titles and advice may name, in words."""
    words = None if blocks is None else view.in_words(*blocks)
    first = None if blocks is None else view.in_words(blocks[0], blocks[0]).removeprefix("block ")
    return {"block": first, "blocks": words, "step": str(left_step)}


def _head(compiled: Compiled, block: int, view: View) -> int | None:
    """The attention head that stands out in this block, if the rule is on attention heads."""
    is_of_heads = any(measure.name in SIGNS for measure in compiled.measures)
    return head_of(view.heads, block - view.first_block) if is_of_heads and block >= view.first_block else None


def numbers(compiled: Compiled, values: Row) -> dict[str, float | None]:
    """The further numbers that the rule asks to be shown."""
    return {name: number(values[term.index]) for name, term in compiled.evidence.items()}


def summary(compiled: Compiled, title: str, values: Row, view: View, stack: str | None) -> str:
    """One sentence: the title, the stack if there are several, and what was seen.

    A formula that is a number of the evidence, too, has the name that it has there.
    """
    holding = [comparison for comparison in compiled.comparisons if values[comparison.holds.index] is True]
    once = {comparison.value.says: comparison for comparison in reversed(holding)}  # of bounds on one value the first
    names = _names(compiled)
    shown = [*reversed(once.values())][:3]
    seen = [_sentence(_held(comparison, values, view, names), view) for comparison in shown]
    title += "" if stack is None else f" ({stack})"
    return f"{title}: {'; '.join(seen)}." if seen else f"{title}."


def _names(compiled: Compiled) -> dict[int, str]:
    """The names in words that formulas have as evidence, by the index of their term."""
    return {
        term.index: name.replace("_", " ")
        for name, term in compiled.evidence.items()
        if term.says not in {measure.name for measure in term.measures}
    }


def _held(comparison: Comparison, values: Row, view: View, names: Mapping[int, str]) -> dict[str, Any]:
    seen, bounds = values[comparison.value.index], {}
    shown: dict[str, Any] = {"value": comparison.value.says}
    if comparison.value.index in names:
        shown["name"] = names[comparison.value.index]
    for name, bound in comparison.bounds:
        bounds[name] = values[bound.index]
    if isinstance(seen, np.ndarray):
        layer = _farthest(seen, bounds)
        shown |= {"layer": None} if layer is None else _place(comparison.value, layer, len(seen), view)
        seen = math.nan if layer is None else seen[layer]
        bounds = {name: _in_layer(at, layer) for name, at in bounds.items()}
    shown["seen"] = number(seen)
    for name, bound in comparison.bounds:
        shown[name] = number(bounds[name])
        if bound.measures:
            shown["against"] = bound.says
    return shown | {"holds": values[comparison.holds.index]}


def _place(value: Term, layer: int, num_layers: int, view: View) -> dict[str, Any]:
    assert value.layers is not None
    return view.place(value.layers.of(view, num_layers)[layer], is_of_states=view.is_of_states(value.layers.measure))


def _in_layer(bound: Any, layer: int | None) -> Any:
    """What a layer was held against; None where the bound has layers, but not this one."""
    if not isinstance(bound, np.ndarray):
        return bound
    return None if layer is None or layer >= len(bound) else bound[layer]


def _farthest(values: Array, bounds: Mapping[str, Any]) -> int | None:
    """The layer that speaks loudest: the lowest where what is low is bad, else the highest."""
    if not np.isfinite(values).any():
        return None
    is_low = any(name in ("below", "at_most") for name in bounds)
    return int(np.nanargmin(values) if is_low else np.nanargmax(values))


def _sentence(held: Mapping[str, Any], view: View) -> str:
    where = ""
    if held.get("layer") is not None:
        block = held["block"]
        where = " (input of the first block)" if block is None else f" ({view.in_words(block, block)})"
    seen = "not finite" if held["seen"] is None else f"{held['seen']:.3g}"
    against = f", {held['against']}" if "against" in held else ""
    bounds = [f"{name.replace('_', ' ')} {held[name]:.3g}{against}" for name in BOUNDS if held.get(name) is not None]
    return f"{held.get('name', held['value'])}{where} is {seen}" + (f" ({', '.join(bounds)})" if bounds else "")


def _profile(measure: Measure, view: View) -> dict[str, dict[str, Any]]:
    """Where it is first, in the middle, last, lowest and highest. Of activations layer 0 is the first block's input."""
    values = measure.of(view)
    if values is None or not np.size(values):
        return {}
    per_layer = np.asarray(values) if np.ndim(values) == 1 else np.mean(values, axis=1)
    where = {"first": 0, "middle": len(per_layer) // 2, "last": len(per_layer) - 1}
    if np.isfinite(per_layer).any():
        where |= {"lowest": int(np.nanargmin(per_layer)), "highest": int(np.nanargmax(per_layer))}
    is_of_states = view.is_of_states(measure)
    return {
        name: view.place(layer, is_of_states=is_of_states) | {"value": number(per_layer[layer])}
        for name, layer in where.items()
    }


def _window(window: Mapping[str, Sequence[float]]) -> list[dict[str, float | None]]:
    """One row a step."""
    rows: dict[int, dict[str, float | None]] = {}
    for name, cell in window.items():
        for step, value in zip(cell[::2], cell[1::2], strict=True):
            rows.setdefault(int(step), {"step": int(step)})[name] = number(value)
    return [rows[step] for step in sorted(rows)][-SHOWN_SAMPLES:]


def number(value: Any) -> float | None:
    """Six digits are what float32 holds, and NaN is not JSON."""
    return float(f"{float(value):.6g}") if value is not None and math.isfinite(value) else None
