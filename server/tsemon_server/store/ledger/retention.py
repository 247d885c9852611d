"""How long a project keeps what it has, and what is too old for it.

Time runs from when frames settled, and from when a run was last heard of, by the clock of the service.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, literal, or_, select

from tsemon_server.store.ledger import tables
from tsemon_server.store.ledger.attempts import ONE_OF, values_of
from tsemon_server.store.ledger.purging import forget_run

TO_COME_BACK_S = 86_400.0
"""So long after its start the service waits for trainers before it takes them for gone."""


class Retention(NamedTuple):
    """Ages in seconds; None keeps for ever."""

    project: str
    samples_s: float | None = None
    """Age at which charts lose single samples, and see rollups of about 16."""
    rollups_s: float | None = None
    """Age at which they lose those too, and see rollups of about 128, which stay as long as the run."""
    runs_s: float | None = None
    """Age at which a run is deleted."""


def retentions(connection: Connection) -> list[Retention]:
    c = tables.retention.c
    rows = connection.execute(
        select(c.project, c.samples_s, c.rollups_s, c.runs_s)
        .where(or_(c.samples_s.is_not(None), c.rollups_s.is_not(None), c.runs_s.is_not(None)))
        .order_by(c.project)
    )
    return [Retention(*row) for row in rows]


def aged_runs(connection: Connection, retention: Retention, now: float, listening_since: float) -> list[str]:
    """Runs that are to be deleted."""
    if retention.runs_s is None:
        return []
    run = tables.run.c
    is_aged = _is_aged(retention.runs_s, now, listening_since)
    return list(connection.execute(select(run.run_id).where(run.project == retention.project, is_aged)).scalars())


def forget_aged(connection: Connection, run_id: str, retention: Retention, now: float, listening_since: float) -> bool:
    """Delete the run, unless it was heard of in the meantime."""
    assert retention.runs_s is not None
    return forget_run(connection, run_id, _is_aged(retention.runs_s, now, listening_since))


def _is_aged(age_s: float, now: float, listening_since: float) -> ColumnElement[bool]:
    """Of a run that did not end, silence counts only while somebody listened: its trainer may wait for the service."""
    run = tables.run.c
    has_had_time = now - listening_since > min(age_s, TO_COME_BACK_S)
    return and_(run.updated_at < now - age_s, or_(run.state != "running", literal(has_had_time)))


def runs_of(connection: Connection, project: str, run_ids: Collection[str]) -> list[str]:
    """Those of these runs that the project has."""
    run = tables.run.c
    query = select(run.run_id).join(ONE_OF, ONE_OF.c.run_id == run.run_id).where(run.project == project)
    return list(connection.execute(query, {"run_ids": values_of(run_ids)}).scalars())
