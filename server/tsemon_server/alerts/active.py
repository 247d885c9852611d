"""The rules in force: those that came with the service, and what people have made of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tsemon.errors import InvalidDocument, InvalidRules
from tsemon_answers.rules import RuleVersion
from tsemon_server.rules.documents import load
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.rule import Rule
from tsemon_server.store.ledger.rules import Rules

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InForce:
    """Rules, ready to read frames, and which version each of them is."""

    rules: tuple[Rule, ...]
    evaluator: Evaluator
    """Of those that read frames."""
    on_clock: Evaluator
    """Of those that read the service's clock."""
    versions: Mapping[str, int]


class ActiveRules:
    """The rules in force in a database. Asking is cheap: versions are only added, so their number tells of an edit."""

    def __init__(self, built_in: Sequence[Rule]) -> None:
        self._built_in = tuple(built_in)
        self._num_versions = -1
        self._in_force = _in_force(self._built_in, {})

    def of(self, known: Rules) -> InForce:
        """Those that count for what is read or written with `known`, also where another process has edited them."""
        num_versions = known.num_versions()
        if num_versions != self._num_versions:
            rules = {rule.name: rule for rule in self._built_in}
            versions: dict[str, int] = {}
            for newest in known.newest():
                versions[newest.name] = newest.version
                if not newest.enabled:
                    rules.pop(newest.name, None)
                elif newest.origin == "edited":
                    rules.pop(newest.name, None)
                    rules |= {rule.name: rule for rule in _loaded(newest)}
            self._in_force = _in_force(tuple(rules.values()), versions)
            self._num_versions = num_versions
        return self._in_force


def _loaded(version: RuleVersion) -> tuple[Rule, ...]:
    try:
        return load(json.dumps({"rules": [version.definition]}), f"rule {version.name}, version {version.version},")
    except (InvalidDocument, InvalidRules) as error:  # written for another version of tsemon
        log.error("%s; the rule looks at no run until it is edited", error)
        return ()


def _in_force(rules: tuple[Rule, ...], versions: Mapping[str, int]) -> InForce:
    return InForce(rules, *_evaluators(rules), versions)


@lru_cache(maxsize=8)
def _evaluators(rules: tuple[Rule, ...]) -> tuple[Evaluator, Evaluator]:
    """Of those that read frames and of those that read the clock: most new versions change nothing that is in force."""
    return Evaluator(rules), Evaluator(rules, on="clock")
