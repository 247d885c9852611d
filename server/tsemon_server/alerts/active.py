"""The rules in force: those that came with the service, and what people have made of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from tsemon.errors import InvalidRules
from tsemon_answers.rules import RuleVersion
from tsemon_server.alerts.programs import Programs
from tsemon_server.rules.documents import stored
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.rule import Rule
from tsemon_server.store.ledger.rules import Rules
from tsemon_server.store.reading import Reader
from tsemon_server.store.writing import Writer

log = logging.getLogger(__name__)

_PROGRAMS = Programs()


@dataclass(frozen=True)
class InForce:
    """Rules, ready to read frames, and which version each of them is."""

    rules: tuple[Rule, ...]
    evaluator: Evaluator
    """Of those that read frames."""
    on_clock: Evaluator
    """Of those that read the service's clock."""
    versions: Mapping[str, int]


class _Chosen(NamedTuple):
    """Which rules are active in a project."""

    key: str
    """Equal if the rules are."""
    versions: Mapping[str, int]


class _Read(NamedTuple):
    """The state of a database at a number of versions."""

    num_versions: int
    num_of: Mapping[str | None, int]
    """Number of versions of the server (None) and of each project with versions of its own."""
    chosen: dict[str | None, _Chosen]
    """By project, filled on first use; None stands for every other project."""


class ActiveRules:
    """The rules in force in a database, by project.

    Asking is cheap: versions are only added, so their number tells of an edit. An edit of a project's rules concerns that
    project alone, and projects with the same rules have the same evaluators.
    """

    def __init__(self, built_in: Sequence[Rule], programs: Programs = _PROGRAMS) -> None:
        self._built_in = {rule.name: rule for rule in built_in}
        self._digests = {rule.name: rule.digest for rule in built_in}
        self._programs = programs
        self._read = _Read(-1, {}, {})

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
        has_projects = bool(read.num_of.keys() - {None})
        return self._of(read, unit.rules, unit.runs.project_of(run_id) if has_projects else None)

    def of_versions(self, known: Rules, versions: Mapping[str, int]) -> InForce:
        """The rules that were active when these versions were the newest."""
        found = known.of(versions)
        digests = {version.name: version.digest for version in found}
        built_in = [name for name, digest in self._digests.items() if digests.get(name) == digest]
        active = [v if v.name in built_in else v.model_copy(update={"origin": "edited"}) for v in found]
        chosen = self._chosen(active, built_in)
        compiled = self._programs.of(chosen.key, lambda: self._rules(active, built_in))
        return InForce(*compiled, chosen.versions)

    def _now(self, known: Rules) -> _Read:
        before, num_versions = self._read, known.num_versions()
        if num_versions == before.num_versions:
            return before
        num_of = known.num_versions_of()
        kept: dict[str | None, _Chosen] = {}
        if num_of.get(None) == before.num_of.get(None):
            kept = {
                whose: one for whose, one in [*before.chosen.items()] if num_of.get(whose) == before.num_of.get(whose)
            }
        self._read = _Read(num_versions, num_of, kept)
        return self._read

    def _of(self, read: _Read, known: Rules, project: str | None) -> InForce:
        whose = project if project in read.num_of else None
        chosen = read.chosen.get(whose)
        if chosen is None:
            chosen = read.chosen[whose] = self._chosen(known.newest(whose), self._built_in)
        compiled = self._programs.of(chosen.key, lambda: self._rules(known.newest(whose), self._built_in))
        return InForce(*compiled, chosen.versions)

    def _chosen(self, active: Iterable[RuleVersion], built_in: Iterable[str]) -> _Chosen:
        digests, versions = {name: self._digests[name] for name in built_in}, dict[str, int]()
        for version in active:
            versions[version.name] = version.version
            if not version.enabled:
                digests.pop(version.name, None)
            elif version.origin == "edited":
                digests.pop(version.name, None)
                digests[version.name] = version.digest
        said = "\n".join(f"{name} {digest}" for name, digest in digests.items())
        return _Chosen(sha256(said.encode()).hexdigest(), versions)

    def _rules(self, active: Iterable[RuleVersion], built_in: Iterable[str]) -> Sequence[Rule]:
        rules = {name: self._built_in[name] for name in built_in}
        for version in active:
            if not version.enabled:
                rules.pop(version.name, None)
            elif version.origin == "edited":
                rules.pop(version.name, None)
                rules |= {rule.name: rule for rule in _loaded(version)}
        return [*rules.values()]


def _loaded(version: RuleVersion) -> tuple[Rule, ...]:
    try:
        return (stored(version.definition, f"rule {version.name}, version {version.version}"),)
    except InvalidRules as error:  # written for another version of tsemon
        log.error("%s; the rule looks at no run until it is edited", error)
        return ()
