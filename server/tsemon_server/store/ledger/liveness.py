"""What the rules on the clock ask of all running runs at once, and what they remember of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, bindparam, case, exists, select, update

from tsemon_server.store.engine import insert_missing
from tsemon_server.store.ledger import tables
from tsemon_server.store.ledger.attempts import is_live, state_of


class RunningRun(NamedTuple):
    """A run whose writer has not said that it ended."""

    run_id: str
    attempt: int
    heard_at: float
    process_step: int | None
    project: str
    num_skipped: int = 0
    """Number of its frames that no rule has read."""


class Watched(NamedTuple):
    """What is remembered of a run by the rules on the clock."""

    run_id: str
    attempt: int
    pulse: Mapping[str, Any]
    """What was seen of its process."""
    rules: bytes
    """What the rules remember."""


class Liveness:
    """How the processes of runs do."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def running(self, heard_since: float) -> list[RunningRun]:
        """All runs that are running and were heard of since."""
        c, a = tables.run.c, tables.attempt.c
        # The run's own time is exact, but other attempts renew it, too.
        other = tables.attempt.alias("other").c
        has_others = exists().where(other.run_id == c.run_id, other.attempt != c.attempt, other.state == "running")
        heard_at = case((has_others, a.heard_at), else_=c.updated_at)
        is_current = and_(a.run_id == c.run_id, a.attempt == c.attempt)
        query = select(c.run_id, c.attempt, heard_at, c.process_step, c.project).join(tables.attempt, is_current)
        rows = self._connection.execute(query.where(a.state == "running", c.updated_at >= heard_since)).all()
        p = tables.rule_progress.c
        skipped = select(p.run_id, p.attempt, p.num_skipped).where(p.num_skipped > 0)
        num_skipped = {(run_id, attempt): number for run_id, attempt, number in self._connection.execute(skipped)}
        return [RunningRun(*row, num_skipped.get((row.run_id, row.attempt), 0)) for row in rows]

    def superseded(self, now: float) -> list[RunningRun]:
        """Silent attempts that a later one follows."""
        c, a = tables.run.c, tables.attempt.c
        is_left = and_(a.run_id == c.run_id, a.attempt != c.attempt, a.state == "running", ~is_live(now))
        query = select(a.run_id, c.attempt, a.heard_at, c.process_step, c.project).join(tables.run, is_left)
        return [RunningRun(*row) for row in self._connection.execute(query)]

    def watched(self, run_ids: Iterable[str]) -> list[Watched]:
        """What is remembered of those of these runs that were looked at before."""
        c = tables.watched.c
        query = select(c.run_id, c.attempt, c.pulse, c.rules).where(c.run_id.in_(run_ids))
        return [Watched(*row) for row in self._connection.execute(query)]


class LivenessChanges(Liveness):
    """Changes of it."""

    def is_running(self, run_id: str, attempt: int) -> bool:
        """Whether the run is still running, in this attempt; it stays so to the end of this transaction."""
        return state_of(self._connection, run_id, attempt) == "running"

    def keep(self, watched: Iterable[Watched]) -> None:
        """Remember this of runs, in place of what was."""
        rows = [entry._asdict() for entry in watched]
        if not rows:
            return
        insert_missing(self._connection, tables.watched, rows)
        c = tables.watched.c
        changed: dict[str, Any] = {name: bindparam(f"new_{name}") for name in ("attempt", "pulse", "rules")}
        self._connection.execute(
            update(tables.watched).where(c.run_id == bindparam("which")).values(**changed),
            [{"which": row["run_id"]} | {f"new_{name}": row[name] for name in changed} for row in rows],
        )
