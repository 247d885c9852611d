"""How long a project keeps what it has, and which runs are too old for it.

Time runs from when frames settled, and from when a run was last heard of, by the clock of the service.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, delete, insert, literal, or_, select

from tsemon_server.store.ledger import tables
from tsemon_server.store.ledger.attempts import ONE_OF, values_of
from tsemon_server.store.ledger.tombstones import forget_run

TO_COME_BACK_S = 86_400.0
"""So long after its start the service waits for trainers before it takes them for gone."""

_run, _retention = tables.run.c, tables.retention.c


class Retention(NamedTuple):
    """Ages in seconds; None keeps for ever."""

    project: str
    samples_s: float | None = None
    """Age at which charts lose single samples, and see rollups of about 16."""
    rollups_s: float | None = None
    """Age at which they lose those too, and see rollups of about 128, which stay as long as the run."""
    runs_s: float | None = None
    """Age at which a run is deleted."""


class Retentions:
    """Retention of all projects."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def all(self) -> list[Retention]:
        """Of the projects that do not keep all for ever."""
        ages = (_retention.samples_s, _retention.rollups_s, _retention.runs_s)
        query = select(_retention.project, *ages).where(or_(*(age.is_not(None) for age in ages)))
        return [Retention(*row) for row in self._connection.execute(query.order_by(_retention.project))]

    def aged_runs(self, retention: Retention, now: float, listening_since: float) -> list[str]:
        """Runs that are to be deleted."""
        if retention.runs_s is None:
            return []
        is_aged = _is_aged(retention.runs_s, now, listening_since)
        query = select(_run.run_id).where(_run.project == retention.project, is_aged)
        return list(self._connection.execute(query).scalars())

    def of_project(self, project: str, run_ids: Collection[str]) -> list[str]:
        """The given runs, as far as the project has them."""
        query = select(_run.run_id).join(ONE_OF, ONE_OF.c.run_id == _run.run_id).where(_run.project == project)
        return list(self._connection.execute(query, {"run_ids": values_of(run_ids)}).scalars())


class RetentionChanges(Retentions):
    """Changes of retention, and the deletion of runs that are too old for it."""

    def keep(self, retention: Retention) -> None:
        """From now on, keep for so long what its project has."""
        self._connection.execute(delete(tables.retention).where(_retention.project == retention.project))
        self._connection.execute(insert(tables.retention).values(**retention._asdict()))

    def forget_aged(self, run_id: str, retention: Retention, now: float, listening_since: float) -> bool:
        """Delete the run, unless it was heard of in the meantime."""
        assert retention.runs_s is not None
        return forget_run(self._connection, run_id, _is_aged(retention.runs_s, now, listening_since))


def _is_aged(age_s: float, now: float, listening_since: float) -> ColumnElement[bool]:
    """Of a run that did not end, silence counts only while somebody listened: its trainer may wait for the service."""
    has_had_time = now - listening_since > min(age_s, TO_COME_BACK_S)
    return and_(_run.updated_at < now - age_s, or_(_run.state != "running", literal(has_had_time)))
