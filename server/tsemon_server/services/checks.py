"""Checks of a rule in an editor: all its mistakes, or the rule in words. Nothing is kept."""

from __future__ import annotations

from tsemon.errors import InvalidArgument, InvalidRules
from tsemon_answers.rules import CheckedRule, RuleMistake
from tsemon_server.alerts.explaining import explain
from tsemon_server.alerts.rulebook import as_file
from tsemon_server.rules import printing
from tsemon_server.rules.checking import mistakes, unmeasured
from tsemon_server.rules.line import MistakeInLine
from tsemon_server.rules.parts import Mistake, Part
from tsemon_server.rules.rule import rule
from tsemon_server.yaml_lines import parse, written


def check(text: str) -> CheckedRule:
    """Check a rule file with one rule, or the definition of a rule as JSON. Raises InvalidDocument or InvalidRules."""
    data, _ = parse(as_file(text), "body")
    try:
        listed = [*Part(data).has_keys(["rules"])["rules"].items()]
    except Mistake as mistake:
        raise InvalidRules(f"body: {mistake}") from None
    if len(listed) != 1:
        raise InvalidArgument(f"body: expected one rule, got {len(listed)}; check each by itself")
    definition = Part(listed[0].data)
    found = mistakes(definition)
    if found:
        return CheckedRule(mistakes=[_shown(mistake) for mistake in found], lines={}, explained=None, notes=[])
    read = rule(definition)
    keys = ("when", "clear", "only_while")
    lines = {key: printing.condition(read.tree[key]) for key in keys if key in read.tree}
    return CheckedRule(mistakes=[], lines=lines, explained=explain(read), notes=[*unmeasured(read)])


def _shown(mistake: Mistake) -> RuleMistake:
    field = written(mistake.path)
    if not isinstance(mistake, MistakeInLine):
        return RuleMistake(field=field, text=str(mistake), column=None, length=None, nearest=None, example=None)
    wrong = mistake.wrong
    return RuleMistake(
        field=field,
        text=str(wrong),
        column=wrong.place + 1,
        length=wrong.length_in(mistake.line),
        nearest=wrong.nearest or None,
        example=wrong.example or None,
    )
