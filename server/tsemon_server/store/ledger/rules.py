"""The versions of rules.

Versions are added and never change, so their number tells whether there is a new one. A version is of the whole server or
of one project, in which it goes before the server's; both are numbered in one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, func, or_, select, tuple_

from tsemon_answers.rules import RuleVersion
from tsemon_server.store.engine import insert_if_missing
from tsemon_server.store.ledger import tables
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.times import utc

Origin = Literal["built-in", "edited", "server"]

_version = tables.rule_version.c

# On the path of every frame.
_NUM_VERSIONS = Prepared(select(func.count()).select_from(tables.rule_version))


class Definition(NamedTuple):
    """What a new version says."""

    name: str
    digest: str
    definition: Mapping[str, Any]


class Rules:
    """All rules."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection, self._now = connection, now

    def num_versions(self) -> int:
        """Of all rules; another number than before says that there are new ones. Cheap enough to ask for each body."""
        (found,) = _NUM_VERSIONS.run(self._connection, {}).fetchone()
        return int(found)

    def num_versions_of(self) -> dict[str | None, int]:
        """The same of the server (None) and of each project that has ever had its own."""
        counts = select(_version.project, func.count().label("num")).group_by(_version.project)
        return {row.project: row.num for row in self._connection.execute(counts)}

    def newest(self, project: str | None = None) -> list[RuleVersion]:
        """The active version of each rule, by name: the project's own if it has one, else the server's."""
        found = {version.name: version for version in self._newest(_version.project.is_(None))}
        if project is not None:
            found |= {version.name: version for version in self.own(project)}
        return [found[name] for name in sorted(found)]  # engines disagree on what comes first

    def own(self, project: str) -> list[RuleVersion]:
        """The newest version of each rule that the project has itself, except rules that it gave back."""
        return [version for version in self._newest(_version.project == project) if version.origin != "server"]

    def projects(self, name: str | None = None) -> list[str]:
        """The projects that have versions of their own, of this rule or of any."""
        is_meant = [_version.project.is_not(None), *([] if name is None else [_version.name == name])]
        own = _newest(and_(*is_meant), _version.project).where(_version.origin != "server").distinct()
        return sorted(self._connection.execute(own).scalars())

    def versions(self, name: str, project: str | None = None) -> list[RuleVersion]:
        """All versions of a rule, the active one first; empty if the rule is unknown.

        In a project these are its own and the server's, each from the newest on.
        """
        is_meant = (_version.name == name) & _scope(project)
        rows = self._connection.execute(select(tables.rule_version).where(is_meant).order_by(_version.version.desc()))
        found = list(map(_version_of, rows))
        own = [version for version in found if version.project is not None]
        is_own = bool(own) and own[0].origin != "server"
        return sorted(found, key=lambda version: (version.project is not None) != is_own)

    def of(self, versions: Mapping[str, int]) -> list[RuleVersion]:
        """These versions, by name."""
        is_meant = tuple_(_version.name, _version.version).in_(list(versions.items()))
        rows = self._connection.execute(select(tables.rule_version).where(is_meant))
        return sorted(map(_version_of, rows), key=lambda version: version.name)

    def _newest(self, is_meant: ColumnElement[bool]) -> list[RuleVersion]:
        return list(map(_version_of, self._connection.execute(_newest(is_meant))))


class RuleChanges(Rules):
    """Changes of rules."""

    def add_versions(
        self, definitions: Sequence[Definition], origin: Origin, *, enabled: bool = True, project: str | None = None
    ) -> None:
        """Let each of them be the newest of its rule, in the server or in a project; one that is so already is not added.

        Other processes may add versions at the same moment: they are all kept, one after the other.
        """
        # The pack has dozens, a database may be far.
        newest, numbers = self._last(project, [new.name for new in definitions])
        for new in definitions:
            row = {**new._asdict(), "origin": origin, "enabled": enabled, "project": project, "created_at": self._now}
            while newest.get(new.name) != (new.digest, origin, enabled):
                number = numbers.get(new.name, 0) + 1
                if insert_if_missing(self._connection, tables.rule_version, {**row, "version": number}):
                    break
                again = self._last(project, [new.name])
                newest, numbers = newest | again[0], numbers | again[1]

    def _last(
        self, project: str | None, names: Sequence[str]
    ) -> tuple[dict[str, tuple[str, Origin, bool]], dict[str, int]]:
        """Content of the newest version of each rule, in the server or in a project, and its highest number."""
        is_meant = _version.name.in_(names)
        is_of_project = _version.project.is_(None) if project is None else _version.project == project
        # First the numbers: if others add a version before the second query, the next number is taken.
        highest = (
            select(_version.name, func.max(_version.version).label("last")).where(is_meant).group_by(_version.name)
        )
        numbers = {row.name: row.last for row in self._connection.execute(highest)}
        newest = self._newest(is_meant & is_of_project)
        return {version.name: (version.digest, version.origin, version.enabled) for version in newest}, numbers


def _scope(project: str | None) -> ColumnElement[bool]:
    """The versions that a project can see: the server's and its own."""
    is_servers = _version.project.is_(None)
    return is_servers if project is None else or_(is_servers, _version.project == project)


def _newest(is_meant: ColumnElement[bool], *columns: ColumnElement[Any]) -> Select[Any]:
    """The newest of these versions of each rule, in the server and in each project."""
    newest = select(_version.name, func.max(_version.version)).where(is_meant).group_by(_version.name, _version.project)
    return select(*columns or _version).where(tuple_(_version.name, _version.version).in_(newest))


def _version_of(row: Row[Any]) -> RuleVersion:
    return RuleVersion.model_validate({**row._mapping, "created_at": utc(row.created_at)})
