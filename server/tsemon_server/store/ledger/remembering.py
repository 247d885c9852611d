"""What the rules remember of a run: on the path of every frame."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, bindparam, delete, func, insert, or_, select, update

from tsemon_server.store.ledger import tables
from tsemon_server.store.prepared import Prepared

_state, _checkpoint = tables.rule_state.c, tables.rule_checkpoint.c
_STATE = Prepared(select(_state.attempt, _state.state).where(_state.run_id == bindparam("run_id")))
_REPLACE_STATE = Prepared(
    update(tables.rule_state)
    .where(_state.run_id == bindparam("which"))
    .values(attempt=bindparam("attempt"), state=bindparam("state"))
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
        or_(
            _checkpoint.attempt != bindparam("attempt"),
            _checkpoint.step >= bindparam("step"),
            _checkpoint.step < _newest_before,
        ),
    )
)
_INSERT_CHECKPOINT = Prepared(insert(tables.rule_checkpoint))


class RuleState(NamedTuple):
    """What the rules remember of a run's attempt."""

    attempt: int
    state: bytes


class RuleCheckpoint(NamedTuple):
    """What the rules remembered of a run's attempt when `step` was the last one that they had seen."""

    step: int
    state: bytes


def rule_state(connection: Connection, run_id: str) -> RuleState | None:
    row = _STATE.run(connection, {"run_id": run_id}).fetchone()
    return None if row is None else RuleState(*row)


def keep_rule_state(connection: Connection, run_id: str, kept: RuleState) -> None:
    if not _REPLACE_STATE.run(connection, {"which": run_id, **kept._asdict()}).rowcount:
        _INSERT_STATE.run(connection, {"run_id": run_id, **kept._asdict()})


def rule_checkpoints(connection: Connection, run_id: str, attempt: int) -> list[RuleCheckpoint]:
    rows = _CHECKPOINTS.run(connection, {"run_id": run_id, "attempt": attempt}).fetchall()
    return [RuleCheckpoint(*row) for row in rows]


def keep_rule_checkpoint(connection: Connection, run_id: str, attempt: int, checkpoint: RuleCheckpoint) -> None:
    kept = {"run_id": run_id, "attempt": attempt, **checkpoint._asdict()}
    _FORGET_CHECKPOINTS.run(connection, kept)
    _INSERT_CHECKPOINT.run(connection, kept)


def forget(connection: Connection, run_id: str) -> None:
    for table in (tables.rule_state, tables.rule_checkpoint):
        connection.execute(delete(table).where(table.c.run_id == run_id))
