"""A rule in words: what it waits for, line by line, as people read it."""

from __future__ import annotations

from collections.abc import Iterator

from tsemon_answers.rules import ExplainedHold, ExplainedLine, ExplainedRule
from tsemon_server.rules.grammar import condition
from tsemon_server.rules.parts import Part
from tsemon_server.rules.program import Program
from tsemon_server.rules.rule import Hold, Rule

_JOINED = {"all": "all of", "any": "any of"}


def explain(rule: Rule) -> ExplainedRule:
    """Read from its definition."""
    part = Part(rule.tree)

    def lines(key: str) -> list[ExplainedLine]:
        return list(_lines(part[key], 0)) if key in part else []

    return ExplainedRule(
        watches=sorted({measure.name for measure in rule.measures}),
        when=lines("when"),
        clear=lines("clear"),
        only_while=lines("only_while"),
        hold=_told(rule.hold),
        clear_hold=_told(rule.clear_hold),
        after=_told(rule.after),
    )


def _told(hold: Hold) -> ExplainedHold:
    return ExplainedHold(samples=hold.samples, steps=hold.steps)


def _lines(part: Part, depth: int, before: str = "") -> Iterator[ExplainedLine]:
    if "not" in part:
        yield from _lines(part["not"], depth, f"{before}not ")
    elif "condition" in part:
        yield ExplainedLine(
            depth=depth, text=f"{before}in at least {part['at_least'].data} of the last {part['in_last'].data} samples"
        )
        yield from _lines(part["condition"], depth + 1)
    elif "value" in part:
        yield ExplainedLine(depth=depth, text=before + condition(part, Program()).says)
    else:
        ((name, word),) = ((name, word) for name, word in _JOINED.items() if name in part)
        yield ExplainedLine(depth=depth, text=before + word)
        for item in part[name].items():
            yield from _lines(item, depth + 1)
