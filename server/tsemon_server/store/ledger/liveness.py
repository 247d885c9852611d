"""What the rules on the clock ask of all running runs at once, and what they remember of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, select, update

from tsemon_server.store.engine import insert_missing
from tsemon_server.store.ledger import tables


class RunningRun(NamedTuple):
    """A run whose writer has not said that it ended."""

    run_id: str
    attempt: int
    heard_at: float
    process_step: int | None


class Watched(NamedTuple):
    """What is remembered of a run by the rules on the clock."""

    run_id: str
    attempt: int
    pulse: Mapping[str, Any]
    """What was seen of its process."""
    rules: bytes
    """What the rules remember."""


def running_runs(connection: Connection, heard_since: float) -> list[RunningRun]:
    c = tables.run.c
    query = select(c.run_id, c.attempt, c.updated_at, c.process_step).where(
        c.state == "running", c.updated_at >= heard_since
    )
    return [RunningRun(*row) for row in connection.execute(query)]


def watched_runs(connection: Connection, run_ids: Iterable[str]) -> list[Watched]:
    c = tables.watched.c
    rows = connection.execute(select(c.run_id, c.attempt, c.pulse, c.rules).where(c.run_id.in_(run_ids)))
    return [Watched(*row) for row in rows]


def keep_watched(connection: Connection, watched: Iterable[Watched]) -> None:
    rows = [entry._asdict() for entry in watched]
    if not rows:
        return
    insert_missing(connection, tables.watched, rows)
    c = tables.watched.c
    changed: dict[str, Any] = {name: bindparam(f"new_{name}") for name in ("attempt", "pulse", "rules")}
    connection.execute(
        update(tables.watched).where(c.run_id == bindparam("which")).values(**changed),
        [{"which": row["run_id"]} | {f"new_{name}": row[name] for name in changed} for row in rows],
    )
