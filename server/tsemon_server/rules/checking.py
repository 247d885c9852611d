"""All mistakes of one definition, where reading it ends at the first, and names in it that tsemon does not measure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from tsemon.catalogue import LAYERED, most_alike, nearest
from tsemon_server.rules.bounds import check_one
from tsemon_server.rules.parts import Mistake, Part
from tsemon_server.rules.rule import KEYS, Rule, rule

_STAND_IN = {"name": "x", "when": "loss > 0"}
"""A rule that is right except for the one key that is checked."""
_OF_CLOCK = {"name": "x", "on": "clock", "when": "silent_seconds > 0"}
_READERS = "when", "clear", "only_while"
"""Keys with conditions."""


def mistakes(part: Part) -> list[Mistake]:
    """The mistakes in a definition, at most one for each of its keys and one that concerns several."""
    first = _mistake(part.data)
    if first is None:
        return _too_dear(part)
    found = {first.path: first}
    for key in KEYS:
        if key in part:
            beside = {"title": ("evidence",), "advice": ("evidence",), "on": _READERS}.get(
                key, ("on",) if key in _READERS else ()
            )
            given = {other: part.data[other] for other in beside if other in part}
            stand_in = _OF_CLOCK if part.data.get("on") == "clock" else _STAND_IN
            mistake = _mistake({**stand_in, **given, key: part.data[key]})
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


class Lack(NamedTuple):
    """A metric that a condition reads and a run does not have."""

    kind: str
    name: str
    nearest: str | None
    """The most similar metric of the run, as a line names it."""

    def __str__(self) -> str:
        of = {"scalar": "scalar", "layers": "metric with layers", "heads": "metric with heads"}[self.kind]
        return f"no {of} {self.name!r}" + (f"; did you mean {self.nearest}?" if self.nearest else "")


def lacks(read: Rule, has: Mapping[str, Collection[str]]) -> list[Lack]:
    """The metrics that the condition of a rule reads and a run lacks; `has` are the names of each kind."""
    missing = [measure for measure in sorted(read.measures) if measure.name not in has[measure.kind]]
    return [Lack(measure.kind, measure.name, _alike(measure.kind, measure.name, has)) for measure in missing]


def _alike(kind: str, name: str, has: Mapping[str, Collection[str]]) -> str | None:
    """The same name of another kind, else the most similar name, preferably of the same kind."""
    for other in has:
        if name in has[other]:
            return f'{other}("{name}")'
    for other in (kind, *has):
        near = most_alike(name, has[other])
        if near is not None:
            return f'{other}("{near}")'
    return None


def unmeasured(read: Rule) -> Iterator[str]:
    """A sentence for each name with layers that tsemon does not measure: a misspelling, or a metric of another writer."""
    for measure in sorted(read.all_measures):
        if measure.kind != "scalar" and measure.name not in LAYERED:
            hint = nearest(measure.name, list(LAYERED))
            yield f"rule {read.name} reads {measure.kind} {measure.name!r}, which tsemon does not measure; {hint}"
