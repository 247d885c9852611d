"""The running attempts of all runs, and the memory of the time-based rules for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, bindparam, case, func, select, update

from tsemon_server.store.engine import insert_missing
from tsemon_server.store.ledger import tables
from tsemon_server.store.ledger.attempts import state_of


class RunningAttempt(NamedTuple):
    """An attempt whose writer has not said that it ended."""

    run_id: str
    attempt: int
    heard_at: float
    process_step: int | None
    """None for one that a later attempt follows: only the step of the current process is known exactly."""
    project: str
    read_to: int | None
    """The last of its steps that the rules have read."""
    num_skipped: int | None
    """Number of its frames that no rule has read."""
    followed_at: float | None
    """When the next attempt of the run began."""

    @property
    def is_replaced(self) -> bool:
        """Whether it sent nothing since the next one began: after a restart the earlier process is gone."""
        return self.followed_at is not None and self.heard_at <= self.followed_at


class Watched(NamedTuple):
    """The memory of the time-based rules for an attempt."""

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

    def running(self, heard_since: float) -> list[RunningAttempt]:
        """All running attempts of runs updated since then, in the order in which runs are locked."""
        c, a, p = tables.run.c, tables.attempt.c, tables.rule_progress.c
        next_one = tables.attempt.alias("next_one").c
        followed_at = select(func.min(next_one.started_at)).where(
            next_one.run_id == a.run_id, next_one.attempt > a.attempt
        )
        process_step = case((a.attempt == c.attempt, c.process_step))
        query = (
            select(
                *(a.run_id, a.attempt, a.heard_at, process_step, c.project, p.read_to, p.num_skipped),
                followed_at.scalar_subquery(),
            )
            .select_from(tables.run)
            .join(tables.attempt, a.run_id == c.run_id)
            .outerjoin(tables.rule_progress, and_(p.run_id == a.run_id, p.attempt == a.attempt))
            .where(a.state == "running", c.updated_at >= heard_since)
            .order_by(a.run_id, a.attempt)
        )
        return [RunningAttempt(*row) for row in self._connection.execute(query)]

    def watched(self, run_ids: Iterable[str]) -> list[Watched]:
        """The stored memory of all attempts of these runs."""
        c = tables.watched.c
        query = select(c.run_id, c.attempt, c.pulse, c.rules).where(c.run_id.in_(run_ids))
        return [Watched(*row) for row in self._connection.execute(query)]


class LivenessChanges(Liveness):
    """Changes of it."""

    def is_running(self, run_id: str, attempt: int) -> bool:
        """Whether the attempt is still running; it stays so to the end of this transaction."""
        return state_of(self._connection, run_id, attempt) == "running"

    def keep(self, watched: Iterable[Watched]) -> None:
        """Replace the memory of these attempts."""
        rows = [entry._asdict() for entry in watched]
        if not rows:
            return
        insert_missing(self._connection, tables.watched, rows)
        c = tables.watched.c
        changed: dict[str, Any] = {name: bindparam(f"new_{name}") for name in ("pulse", "rules")}
        which = (c.run_id == bindparam("of_run"), c.attempt == bindparam("of_attempt"))
        self._connection.execute(
            update(tables.watched).where(*which).values(**changed),
            [
                {"of_run": row["run_id"], "of_attempt": row["attempt"]} | {f"new_{name}": row[name] for name in changed}
                for row in rows
            ],
        )
