"""The rules in force: those that came with the service, and what people have made of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tsemon.errors import InvalidDocument, InvalidRules
from tsemon_answers.rules import RuleVersion
from tsemon_server.rules.documents import load
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.rule import Rule
from tsemon_server.store.ledger.rules import Rules
from tsemon_server.store.reading import Reader
from tsemon_server.store.writing import Writer

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


@dataclass(frozen=True)
class _Read:
    """The state of a database at a number of versions."""

    num_versions: int
    projects: frozenset[str]
    """Projects with versions of their own."""
    in_force: dict[str | None, InForce] = field(default_factory=dict)
    """Rules of each of these projects, filled on first use; None stands for every other project."""


class ActiveRules:
    """The rules in force in a database, by project.

    Asking is cheap: versions are only added, so their number tells of an edit. Projects with the same rules have the same
    evaluators.
    """

    def __init__(self, built_in: Sequence[Rule]) -> None:
        self._built_in = tuple(built_in)
        self._read = _Read(-1, frozenset())

    def of(self, known: Rules, project: str | None) -> InForce:
        """Rules that are active in a project for the transaction of `known`, including the edits of other processes. None
        stands for a project without its own."""
        return self._of(self._now(known), known, project)

    def of_projects(self, known: Rules, projects: Iterable[str]) -> dict[str, InForce]:
        """Active rules of each of these projects."""
        read = self._now(known)
        return {project: self._of(read, known, project) for project in projects}

    def of_run(self, unit: Reader | Writer, run_id: str) -> InForce:
        """Active rules of the project of a run. The project is looked up only if any project has its own rules."""
        read = self._now(unit.rules)
        return self._of(read, unit.rules, unit.runs.project_of(run_id) if read.projects else None)

    def of_versions(self, known: Rules, versions: Mapping[str, int]) -> InForce:
        """The rules that were active when these versions were the newest."""
        built_in = {rule.name: rule for rule in self._built_in}
        found = known.of(versions)
        is_as_now = {v.name for v in found if v.name in built_in and v.digest == built_in[v.name].digest}
        now = [rule for rule in self._built_in if rule.name in is_as_now]
        return _in_force(now, [v if v.name in is_as_now else v.model_copy(update={"origin": "edited"}) for v in found])

    def _now(self, known: Rules) -> _Read:
        read, num_versions = self._read, known.num_versions()
        if num_versions != read.num_versions:
            read = self._read = _Read(num_versions, frozenset(known.projects()))
        return read

    def _of(self, read: _Read, known: Rules, project: str | None) -> InForce:
        whose = project if project in read.projects else None
        if whose not in read.in_force:
            read.in_force[whose] = _in_force(self._built_in, known.newest(whose))
        return read.in_force[whose]


def _in_force(built_in: Iterable[Rule], active: Iterable[RuleVersion]) -> InForce:
    rules = {rule.name: rule for rule in built_in}
    versions: dict[str, int] = {}
    for version in active:
        versions[version.name] = version.version
        if not version.enabled:
            rules.pop(version.name, None)
        elif version.origin == "edited":
            rules.pop(version.name, None)
            rules |= {rule.name: rule for rule in _loaded(version)}
    in_force = tuple(rules.values())
    return InForce(in_force, *_evaluators(in_force), versions)


def _loaded(version: RuleVersion) -> tuple[Rule, ...]:
    try:
        return load(json.dumps({"rules": [version.definition]}), f"rule {version.name}, version {version.version},")
    except (InvalidDocument, InvalidRules) as error:  # written for another version of tsemon
        log.error("%s; the rule looks at no run until it is edited", error)
        return ()


@lru_cache(maxsize=64)
def _evaluators(rules: tuple[Rule, ...]) -> tuple[Evaluator, Evaluator]:
    """Of those that read frames and of those that read the clock: most new versions change nothing that is in force."""
    return Evaluator(rules), Evaluator(rules, on="clock")
