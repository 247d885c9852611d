"""What rules were from when on. Versions are added and never change, so their number tells whether there is a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import Column, Connection, Row, Select, Table, bindparam, func, select

from tsemon_server.store.engine import insert_if_missing
from tsemon_server.store.ledger import tables
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.records import RuleVersion
from tsemon_server.store.times import utc

Origin = Literal["built-in", "edited"]

_NUM_VERSIONS = Prepared(select(func.count()).select_from(tables.rule_version))
_VERSION_OF = Prepared(
    select(func.max(tables.rule_version.c.version)).where(
        tables.rule_version.c.name == bindparam("name"), tables.rule_version.c.digest == bindparam("digest")
    )
)


class Definition(NamedTuple):
    """What a new version says."""

    name: str
    digest: str
    definition: Mapping[str, Any]


def num_versions(connection: Connection) -> int:
    """Of all rules. Cheap enough to ask for each body of frames."""
    (found,) = _NUM_VERSIONS.run(connection, {}).fetchone()
    return int(found)


def version_of(connection: Connection, name: str, digest: str) -> int | None:
    """The newest version of the rule that is so defined."""
    (found,) = _VERSION_OF.run(connection, {"name": name, "digest": digest}).fetchone()
    return None if found is None else int(found)


def newest_versions(connection: Connection) -> list[RuleVersion]:
    """Of each rule, by name."""
    rows = connection.execute(_newest(tables.rule_version))
    return sorted(map(_version, rows), key=lambda version: version.name)  # engines disagree on what comes first


def _newest(*columns: Table | Column[Any]) -> Select[Any]:
    """These columns of the newest version of each rule."""
    c = tables.rule_version.c
    newest = select(c.name, func.max(c.version).label("version")).group_by(c.name).subquery()
    return select(*columns).join(newest, (c.name == newest.c.name) & (c.version == newest.c.version))


def versions_of(connection: Connection, name: str) -> list[RuleVersion]:
    """Of one rule, the newest first."""
    c = tables.rule_version.c
    rows = connection.execute(select(tables.rule_version).where(c.name == name).order_by(c.version.desc()))
    return list(map(_version, rows))


def add_versions(
    connection: Connection, now: float, definitions: Sequence[Definition], origin: Origin, enabled: bool
) -> None:
    """Let each of them be the newest of its rule; one that is so already is not added again.

    Other processes may add versions at the same moment: they are all kept, one after the other.
    """
    c = tables.rule_version.c
    of_version = _newest(c.name, c.version, c.digest, c.origin, c.enabled)
    newest = {row.name: row for row in connection.execute(of_version)}  # the pack has dozens, a database may be far
    for new in definitions:
        row = {**new._asdict(), "origin": origin, "enabled": enabled}
        last = newest.get(new.name)
        while last is None or (last.digest, last.origin, last.enabled) != (new.digest, origin, enabled):
            number = 1 if last is None else last.version + 1
            if insert_if_missing(connection, tables.rule_version, {**row, "version": number, "created_at": now}):
                break
            last = connection.execute(of_version.where(c.name == new.name)).first()


def _version(row: Row[Any]) -> RuleVersion:
    return RuleVersion.model_validate({**row._mapping, "created_at": utc(row.created_at)})
