"""The versions of rules.

Versions are added and never change, so their number tells whether there is a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import Column, Connection, Row, Select, Table, func, select

from tsemon_answers.rules import RuleVersion
from tsemon_server.store.engine import insert_if_missing
from tsemon_server.store.ledger import tables
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.times import utc

Origin = Literal["built-in", "edited"]

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

    def newest(self) -> list[RuleVersion]:
        """The newest version of each rule, by name."""
        rows = self._connection.execute(_newest(tables.rule_version))
        return sorted(map(_version_of, rows), key=lambda version: version.name)  # engines disagree on what comes first

    def versions(self, name: str) -> list[RuleVersion]:
        """All versions of a rule, the newest first; none where nobody knows it."""
        query = select(tables.rule_version).where(_version.name == name).order_by(_version.version.desc())
        return list(map(_version_of, self._connection.execute(query)))


class RuleChanges(Rules):
    """Changes of rules."""

    def add_versions(self, definitions: Sequence[Definition], origin: Origin, *, enabled: bool = True) -> None:
        """Let each of them be the newest of its rule; one that is so already is not added again.

        Other processes may add versions at the same moment: they are all kept, one after the other.
        """
        of_version = _newest(_version.name, _version.version, _version.digest, _version.origin, _version.enabled)
        # The pack has dozens, a database may be far.
        newest = {row.name: row for row in self._connection.execute(of_version)}
        for new in definitions:
            row = {**new._asdict(), "origin": origin, "enabled": enabled, "created_at": self._now}
            last = newest.get(new.name)
            while last is None or (last.digest, last.origin, last.enabled) != (new.digest, origin, enabled):
                number = 1 if last is None else last.version + 1
                if insert_if_missing(self._connection, tables.rule_version, {**row, "version": number}):
                    break
                last = self._connection.execute(of_version.where(_version.name == new.name)).first()


def _newest(*columns: Table | Column[Any]) -> Select[Any]:
    """These columns of the newest version of each rule."""
    newest = select(_version.name, func.max(_version.version).label("version")).group_by(_version.name).subquery()
    is_newest = (_version.name == newest.c.name) & (_version.version == newest.c.version)
    return select(*columns).join(newest, is_newest)


def _version_of(row: Row[Any]) -> RuleVersion:
    return RuleVersion.model_validate({**row._mapping, "created_at": utc(row.created_at)})
