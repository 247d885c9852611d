"""The versions of rules, and their memory of each run.

Versions are added and never change, so their number tells whether there is a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sqlalchemy import Column, Connection, Row, Select, Table, bindparam, delete, func, insert, or_, select, update

from tsemon_answers.rules import RuleVersion
from tsemon_server.store.engine import insert_if_missing
from tsemon_server.store.ledger import tables
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.times import utc

Origin = Literal["built-in", "edited"]

_version, _state, _checkpoint = tables.rule_version.c, tables.rule_state.c, tables.rule_checkpoint.c

# On the path of every frame.
_NUM_VERSIONS = Prepared(select(func.count()).select_from(tables.rule_version))
_STATE = Prepared(
    select(_state.state).where(_state.run_id == bindparam("run_id"), _state.attempt == bindparam("attempt"))
)
_REPLACE_STATE = Prepared(
    update(tables.rule_state)
    .where(_state.run_id == bindparam("which"), _state.attempt == bindparam("of_attempt"))
    .values(state=bindparam("state"))
)
_INSERT_STATE = Prepared(insert(tables.rule_state))
_CHECKPOINTS = Prepared(
    select(_checkpoint.step, _checkpoint.state)
    .where(_checkpoint.run_id == bindparam("run_id"), _checkpoint.attempt == bindparam("attempt"))
    .order_by(_checkpoint.step.desc())
)
_newest_before = (
    select(func.max(_checkpoint.step))
    .where(
        _checkpoint.run_id == bindparam("run_id"),
        _checkpoint.attempt == bindparam("attempt"),
        _checkpoint.step < bindparam("step"),
    )
    .scalar_subquery()
)
# Whatever is written again from a step on, what was written from there on before is of no use.
_FORGET_CHECKPOINTS = Prepared(
    delete(tables.rule_checkpoint).where(
        _checkpoint.run_id == bindparam("run_id"),
        _checkpoint.attempt == bindparam("attempt"),
        or_(_checkpoint.step >= bindparam("step"), _checkpoint.step < _newest_before),
    )
)
_INSERT_CHECKPOINT = Prepared(insert(tables.rule_checkpoint))


class RuleCheckpoint(NamedTuple):
    """What the rules remembered of a run's attempt when `step` was the last one that they had seen."""

    step: int
    state: bytes


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

    def state(self, run_id: str, attempt: int) -> bytes | None:
        """What was last kept; None for an attempt that no rule has looked at."""
        row = _STATE.run(self._connection, {"run_id": run_id, "attempt": attempt}).fetchone()
        return None if row is None else bytes(row[0])

    def checkpoints(self, run_id: str, attempt: int) -> list[RuleCheckpoint]:
        """What was kept of earlier states, the newest first."""
        rows = _CHECKPOINTS.run(self._connection, {"run_id": run_id, "attempt": attempt}).fetchall()
        return [RuleCheckpoint(*row) for row in rows]


class RuleChanges(Rules):
    """Changes of rules, and of their memory."""

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

    def keep_state(self, run_id: str, attempt: int, state: bytes) -> None:
        """Replace what the rules remember of the attempt."""
        kept = {"which": run_id, "of_attempt": attempt, "state": state}
        if not _REPLACE_STATE.run(self._connection, kept).rowcount:
            _INSERT_STATE.run(self._connection, {"run_id": run_id, "attempt": attempt, "state": state})

    def keep_checkpoint(self, run_id: str, attempt: int, step: int, state: bytes) -> None:
        """Keep this state and the newest before it; those of this step on are forgotten."""
        kept = {"run_id": run_id, "attempt": attempt, "step": step, "state": state}
        _FORGET_CHECKPOINTS.run(self._connection, kept)
        _INSERT_CHECKPOINT.run(self._connection, kept)

    def forget_checkpoints(self, run_id: str, attempt: int) -> None:
        """Of an attempt that sends no more; late frames of it are read after all others."""
        which = (_checkpoint.run_id == run_id, _checkpoint.attempt == attempt)
        self._connection.execute(delete(tables.rule_checkpoint).where(*which))


def _newest(*columns: Table | Column[Any]) -> Select[Any]:
    """These columns of the newest version of each rule."""
    newest = select(_version.name, func.max(_version.version).label("version")).group_by(_version.name).subquery()
    is_newest = (_version.name == newest.c.name) & (_version.version == newest.c.version)
    return select(*columns).join(newest, is_newest)


def _version_of(row: Row[Any]) -> RuleVersion:
    return RuleVersion.model_validate({**row._mapping, "created_at": utc(row.created_at)})
