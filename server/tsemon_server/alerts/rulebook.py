"""The rules in force: those of the pack as far as nobody has edited them, and those that people have added."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence

from tsemon.errors import InvalidArgument, InvalidDocument, InvalidRules, UnknownRule
from tsemon_server.rules import PACK, Rule, load
from tsemon_server.store import Definition, Reader, RuleVersion, Store, Writer

log = logging.getLogger(__name__)


class Rulebook:
    """What several processes share by the database: an edit in one is in force for the next frame in each."""

    def __init__(self, pack: Sequence[Rule] = PACK) -> None:
        self._pack = {rule.name: rule for rule in pack}
        self._known: tuple[int, tuple[Rule, ...]] = (-1, ())

    def register(self, store: Store) -> None:
        """Let each rule of the pack that says something new have a version, unless somebody has edited it."""
        with store.write() as writer:
            edited = {version.name for version in writer.newest_rules() if version.origin == "edited"}
            writer.add_rule_versions([_definition(r) for r in self._pack.values() if r.name not in edited], "built-in")

    def active(self, reader: Reader) -> tuple[Rule, ...]:
        """The rules that look at runs. Cheap: they are read again only when there is a new version of any.

        Not to be asked in a transaction that has added versions, which may come to nothing.
        """
        num_versions = reader.num_rule_versions()
        if self._known[0] != num_versions:
            self._known = num_versions, self._read(reader)
        return self._known[1]

    def newest(self, reader: Reader) -> list[RuleVersion]:
        """The newest version of each rule, also of those that are disabled, by name."""
        return [v for v in reader.newest_rules() if v.origin == "edited" or v.name in self._pack]

    def edit(self, writer: Writer, rules: Iterable[Rule]) -> None:
        """Let these be in force. One that says what the pack says is the pack's again."""
        for rule in rules:
            builtin = self._pack.get(rule.name)
            is_as_built_in = builtin is not None and builtin.digest == rule.digest
            writer.add_rule_versions([_definition(rule)], "built-in" if is_as_built_in else "edited")

    def disable(self, writer: Writer, name: str) -> None:
        """Let the rule look at no run any more; what it has opened is over."""
        newest = self.versions(writer, name)[0]
        last = Definition(newest.name, newest.digest, newest.definition)
        writer.add_rule_versions([last], "edited", enabled=False)
        writer.end_alerts_of_rule(name)

    def restore(self, writer: Writer, name: str) -> None:
        """Let a rule of the pack be in force as it came."""
        if name not in self._pack:
            raise UnknownRule(f"no built-in rule is named {name!r}; PUT /api/v1/rules/{name} makes one of your own")
        self.edit(writer, [self._pack[name]])

    def versions(self, reader: Reader, name: str) -> list[RuleVersion]:
        """All versions of a rule, the newest first. Raises UnknownRule."""
        found = reader.rule_versions(name)
        if not found:
            raise UnknownRule(f"no rule is named {name!r}; GET /api/v1/rules lists those there are")
        return found

    def _read(self, reader: Reader) -> tuple[Rule, ...]:
        edited = {version.name: version for version in self.newest(reader) if version.origin == "edited"}
        kept = [rule for name, rule in self._pack.items() if name not in edited]
        return (*kept, *(rule for version in edited.values() if version.enabled for rule in _loaded(version)))


def one_rule(text: str, name: str) -> Rule:
    """The rule of a file with this one rule, or of its definition alone as JSON."""
    # On one line, so that the lines of mistakes stay what they were.
    is_alone = text.lstrip().startswith("{") and '"rules"' not in text
    rules = load(f'{{"rules": [{text}]}}' if is_alone else text, "body")
    if [rule.name for rule in rules] != [name]:
        found = ", ".join(rule.name for rule in rules) or "none"
        raise InvalidArgument(f"body: expected the one rule {name}, got {found}; PUT /api/v1/rules takes a whole file")
    return rules[0]


def _definition(rule: Rule) -> Definition:
    return Definition(rule.name, rule.digest, rule.definition)


def _loaded(version: RuleVersion) -> tuple[Rule, ...]:
    try:
        return load(json.dumps({"rules": [version.definition]}), f"rule {version.name}, version {version.version},")
    except (InvalidDocument, InvalidRules) as error:  # written for another version of tsemon
        log.error("%s; the rule looks at no run until it is edited", error)
        return ()
