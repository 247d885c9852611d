"""Deleted runs: gone at once for everybody, their frames removed later, a few rows at a time."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, Table, delete, insert, select, tuple_

from tsemon_server.store import schema

SLICE_ROWS = {"frame": 500, "chunk": 20, "block": 100, "segment": 500, "settled": 500}
"""So many rows of each table go in one transaction, for which writers wait: a chunk may take a megabyte."""
_SMALL = (
    schema.attempt,
    schema.layout,
    schema.alert,
    schema.rule_state,
    schema.rule_checkpoint,
    schema.watched,
    schema.notice,
    schema.delivery,
)
_LARGE = (schema.frame, schema.chunk, schema.block, schema.segment, schema.settled)


def forget_run(connection: Connection, run_id: str, *only_if: ColumnElement[bool]) -> bool:
    """Remove the run, and mark its frames for removal; False where there is no such run."""
    if not connection.execute(delete(schema.run).where(schema.run.c.run_id == run_id, *only_if)).rowcount:
        return False
    for table in _SMALL:
        connection.execute(delete(table).where(table.c.run_id == run_id))
    connection.execute(insert(schema.tombstone).values(run_id=run_id))
    return True


def forgotten_runs(connection: Connection) -> list[str]:
    """Those whose frames are to be removed."""
    return list(connection.execute(select(schema.tombstone.c.run_id)).scalars())


def remove_slice(connection: Connection, run_id: str) -> int:
    """Remove some rows of a forgotten run; 0 where none are left."""
    return next((num for table in _LARGE if (num := _remove_some(connection, table, run_id))), 0)


def remove_tombstone(connection: Connection, run_id: str) -> None:
    connection.execute(delete(schema.tombstone).where(schema.tombstone.c.run_id == run_id))


def _remove_some(connection: Connection, table: Table, run_id: str) -> int:
    is_of_run = table.c.run_id == run_id
    key = [column for column in table.primary_key if column.name != "run_id"]
    some = select(*key).where(is_of_run).limit(SLICE_ROWS[table.name])
    return connection.execute(delete(table).where(is_of_run, tuple_(*key).in_(some))).rowcount
