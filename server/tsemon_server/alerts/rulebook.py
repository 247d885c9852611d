"""What people make of the rules: each edit is a new version, and the newest version of a rule is the one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress

from tsemon.errors import InvalidArgument, InvalidDocument, InvalidRules, UnknownRule
from tsemon_answers.rules import ExplainedRule, RuleHistory, Rules, RuleVersion
from tsemon_server.alerts.explaining import explain
from tsemon_server.rules.documents import load
from tsemon_server.rules.rule import Rule
from tsemon_server.store import Store
from tsemon_server.store.ledger.rules import Definition, RuleChanges
from tsemon_server.store.ledger.rules import Rules as KnownRules
from tsemon_server.store.writing import Writer


class Rulebook:
    """Versions of the rules of a pack, and of those that people have added. What is in force, `ActiveRules` says."""

    def __init__(self, pack: Sequence[Rule]) -> None:
        self._pack = {rule.name: rule for rule in pack}
        self._explained: dict[str, ExplainedRule] = {}
        """By digest: reading a definition takes longer than all else that `rules` does."""

    def register(self, store: Store) -> None:
        """Let each rule of the pack that says something new have a version, unless somebody has edited it."""
        with store.write() as writer:
            edited = {version.name for version in writer.rules.newest() if version.origin == "edited"}
            writer.rules.add_versions([_definition(r) for r in self._pack.values() if r.name not in edited], "built-in")

    def newest(self, rules: KnownRules) -> list[RuleVersion]:
        """The newest version of each rule, also of those that are disabled, by name."""
        return [v for v in rules.newest() if v.origin == "edited" or v.name in self._pack]

    def rules(self, store: Store) -> Rules:
        """The rules that the server knows, also in words."""
        with store.read() as reader:
            newest = self.newest(reader.rules)
        return Rules(rules=newest, explained=self._in_words(newest))

    def history(self, store: Store, name: str) -> RuleHistory:
        """All versions of a rule. Raises UnknownRule."""
        with store.read() as reader:
            return RuleHistory(versions=self.versions(reader.rules, name))

    def put(self, store: Store, text: str) -> Rules:
        """Let the rules of a file be in force: all of them, or none if one is wrong."""
        rules = load(text, "body")
        with store.write() as writer:
            self.edit(writer.rules, rules)
        return self.rules(store)

    def put_one(self, store: Store, name: str, text: str) -> RuleHistory:
        """Let the one rule of a file, which has this name, be in force."""
        rule = one_rule(text, name)
        with store.write() as writer:
            self.edit(writer.rules, [rule])
        return self.history(store, name)

    def edit(self, book: RuleChanges, rules: Iterable[Rule]) -> None:
        """Let these be in force. One that says what the pack says is the pack's again."""
        for rule in rules:
            builtin = self._pack.get(rule.name)
            is_as_built_in = builtin is not None and builtin.digest == rule.digest
            book.add_versions([_definition(rule)], "built-in" if is_as_built_in else "edited")

    def disable(self, writer: Writer, name: str) -> None:
        """Let the rule look at no run any more; what it has opened is over."""
        newest = self.versions(writer.rules, name)[0]
        last = Definition(newest.name, newest.digest, newest.definition)
        writer.rules.add_versions([last], "edited", enabled=False)
        writer.alerts.end_of_rule(name)

    def restore(self, book: RuleChanges, name: str) -> None:
        """Let a rule of the pack be in force as it came."""
        if name not in self._pack:
            raise UnknownRule(f"no built-in rule is named {name!r}; only one of the pack can be as it came")
        self.edit(book, [self._pack[name]])

    def versions(self, rules: KnownRules, name: str) -> list[RuleVersion]:
        """All versions of a rule, the newest first. Raises UnknownRule."""
        found = rules.versions(name)
        if not found:
            raise UnknownRule(f"no rule is named {name!r}; the list of rules has those there are")
        return found

    def _in_words(self, versions: Sequence[RuleVersion]) -> dict[str, ExplainedRule]:
        known = self._explained
        for version in versions:
            if version.digest in known:
                continue
            with suppress(InvalidDocument, InvalidRules):
                (rule,) = load(json.dumps({"rules": [version.definition]}), version.name)
                known[version.digest] = explain(rule)
        return {version.name: known[version.digest] for version in versions if version.digest in known}


def one_rule(text: str, name: str) -> Rule:
    """The rule of a file with this one rule, or of its definition alone as JSON."""
    rules = load(as_file(text), "body")
    if [rule.name for rule in rules] != [name]:
        found = ", ".join(rule.name for rule in rules) or "none"
        raise InvalidArgument(f"body: expected the one rule {name}, got {found}; PUT /api/v1/rules takes a whole file")
    return rules[0]


def as_file(text: str) -> str:
    """The text of a rule file, or the definition of one rule as JSON as such a file."""
    # On one line, so that the lines of mistakes stay what they were.
    is_alone = text.lstrip().startswith("{") and '"rules"' not in text
    return f'{{"rules": [{text}]}}' if is_alone else text


def _definition(rule: Rule) -> Definition:
    return Definition(rule.name, rule.digest, rule.definition)
