"""A rule in words: what it waits for, line by line, as people read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tsemon_server.rules.grammar import condition
from tsemon_server.rules.parts import Part
from tsemon_server.rules.program import Program
from tsemon_server.rules.rule import Hold, Rule

_JOINED = {"all": "all of", "any": "any of"}


@dataclass(frozen=True)
class Line:
    """One line of a condition."""

    depth: int
    """How far it is indented: it belongs to the last line above it that is less so."""
    text: str
    """A comparison, or what joins the lines below it."""


@dataclass(frozen=True)
class Explanation:
    """What a definition means, with what it leaves to the defaults."""

    watches: tuple[str, ...]
    """The metrics that it reads to be met, by name."""
    when: tuple[Line, ...]
    """When it is met."""
    clear: tuple[Line, ...]
    """When it is over; none where that is when it is not met."""
    only_while: tuple[Line, ...]
    """While it is judged at all; none for always."""
    hold: Hold
    """For how long it must be met."""
    clear_hold: Hold
    """For how long it must be over."""
    after: Hold
    """How much of an attempt it lets pass first."""


def explain(rule: Rule) -> Explanation:
    """Read from its definition."""
    part = Part(rule.definition)

    def lines(key: str) -> tuple[Line, ...]:
        return tuple(_lines(part[key], 0)) if key in part else ()

    return Explanation(
        watches=tuple(sorted({measure.name for measure in rule.measures})),
        when=lines("when"),
        clear=lines("clear"),
        only_while=lines("only_while"),
        hold=rule.hold,
        clear_hold=rule.clear_hold,
        after=rule.after,
    )


def _lines(part: Part, depth: int, before: str = "") -> Iterator[Line]:
    if "not" in part:
        yield from _lines(part["not"], depth, f"{before}not ")
    elif "condition" in part:
        yield Line(depth, f"{before}in at least {part['at_least'].data} of the last {part['in_last'].data} samples")
        yield from _lines(part["condition"], depth + 1)
    elif "value" in part:
        yield Line(depth, before + condition(part, Program()).says)
    else:
        ((name, word),) = ((name, word) for name, word in _JOINED.items() if name in part)
        yield Line(depth, before + word)
        for item in part[name].items():
            yield from _lines(item, depth + 1)
