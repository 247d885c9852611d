"""All mistakes of one definition, where reading it ends at the first, and names in it that tsemon does not measure."""

from __future__ import annotations

from collections.abc import Iterator

from tsemon.catalogue import LAYERED, nearest
from tsemon_server.rules.bounds import check_one
from tsemon_server.rules.parts import Mistake, Part
from tsemon_server.rules.rule import KEYS, Rule, rule

_STAND_IN = {"name": "x", "when": "loss > 0"}
"""A rule that is right except for the one key that is checked."""


def mistakes(part: Part) -> list[Mistake]:
    """The mistakes in a definition, at most one for each of its keys and one that concerns several."""
    first = _mistake(part.data)
    if first is None:
        return _too_dear(part)
    found = {first.path: first}
    for key in KEYS:
        if key in part:
            with_numbers = {"evidence": part.data["evidence"]} if key == "advice" and "evidence" in part else {}
            mistake = _mistake({**_STAND_IN, **with_numbers, key: part.data[key]})
            if mistake is not None:
                found.setdefault(mistake.path, mistake)
    return [*found.values()]


def _too_dear(part: Part) -> list[Mistake]:
    try:
        check_one(rule(part))
    except Mistake as mistake:
        return [mistake]
    return []


def _mistake(definition: object) -> Mistake | None:
    try:
        rule(Part(definition))
    except Mistake as mistake:
        return mistake
    return None


def unmeasured(read: Rule) -> Iterator[str]:
    """A sentence for each name with layers that tsemon does not measure: a misspelling, or a metric of another writer."""
    for measure in sorted(read.all_measures):
        if measure.kind != "scalar" and measure.name not in LAYERED:
            hint = nearest(measure.name, list(LAYERED))
            yield f"rule {read.name} reads {measure.kind} {measure.name!r}, which tsemon does not measure; {hint}"
