"""The rules in force: those that came with the service, and what people have made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tsemon_server.rules import Evaluator, Rule, load
from tsemon_server.store import Reader


@dataclass(frozen=True)
class InForce:
    """Rules, ready to read frames, and which version each of them is."""

    rules: tuple[Rule, ...]
    evaluator: Evaluator
    versions: Mapping[str, int]


class ActiveRules:
    """The rules in force in a database. Asking is cheap: versions are only added, so their number tells of an edit."""

    def __init__(self, built_in: Sequence[Rule]) -> None:
        self._built_in = tuple(built_in)
        self._num_versions = -1
        self._in_force = InForce(self._built_in, Evaluator(self._built_in), {})

    def of(self, reader: Reader) -> InForce:
        """Those that count for what is read or written with `reader`, also where another process has edited them."""
        num_versions = reader.num_rule_versions()
        if num_versions != self._num_versions:
            rules = {rule.name: rule for rule in self._built_in}
            versions: dict[str, int] = {}
            for newest in reader.newest_rules():
                versions[newest.name] = newest.version
                if not newest.enabled:
                    rules.pop(newest.name, None)
                elif newest.origin == "edited":
                    (rules[newest.name],) = load(json.dumps({"rules": [newest.definition]}), f"rule {newest.name}")
            in_force = tuple(rules.values())
            self._in_force = InForce(in_force, Evaluator(in_force), versions)
            self._num_versions = num_versions
        return self._in_force
