"""Deleted runs: gone at once for everybody, their frames removed later."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, delete, insert, select

from tsemon_server.store.ledger import tables


def forget_run(connection: Connection, run_id: str, *only_if: ColumnElement[bool]) -> bool:
    """Remove the run, and mark its frames for removal; False where there is no such run."""
    if not connection.execute(delete(tables.run).where(tables.run.c.run_id == run_id, *only_if)).rowcount:
        return False
    for table in tables.OF_RUN:
        connection.execute(delete(table).where(table.c.run_id == run_id))
    connection.execute(insert(tables.tombstone).values(run_id=run_id))
    return True


def forgotten_runs(connection: Connection) -> list[str]:
    """Those whose frames are to be removed."""
    return list(connection.execute(select(tables.tombstone.c.run_id)).scalars())


def remove_tombstone(connection: Connection, run_id: str) -> None:
    connection.execute(delete(tables.tombstone).where(tables.tombstone.c.run_id == run_id))
