"""The newest values of each run that is live, for those who look at all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, case, func, literal_column, select

from tsemon_server.store.engine import Unit
from tsemon_server.store.ledger import tables
from tsemon_server.store.ledger.leases import SETTLING, done_at
from tsemon_server.store.ledger.silences import is_silenced
from tsemon_server.store.series import Series
from tsemon_server.store.series.frames import Measured
from tsemon_server.store.series.packing import Values
from tsemon_server.store.streams import Address, Stream

COUNTED_AT_MOST = 200_000
"""What is more than that is not counted on: nobody waits for the count of a table that has grown without end."""


class LiveRun(NamedTuple):
    """A run, and what it measured last."""

    run_id: str
    project: str
    run: str
    step: int | None
    """Of the newest frame; None before the first."""
    process_step: int | None
    seen_at: float
    stepped_at: float | None
    newest: list[Values]
    """The newest frame of each writer, the newest first: what pipeline stages sent of one step, for instance."""
    others: list[Values]
    """Frames that hold what those do not, the newest first."""


class LiveRuns(NamedTuple):
    """Those that were wanted, and how many there are beyond."""

    runs: list[LiveRun]
    num_left_out: int


class FiringAlert(NamedTuple):
    """An alert that fires and is not silenced."""

    run_id: str
    rule: str
    family: str
    severity: str


class Backlog(NamedTuple):
    """Work that waits for a service to do it."""

    frames: int
    """Those in rows of their own: some stay so, and what is more is to be packed."""
    notices: int
    """Changes of alerts of which it is not planned yet who is to hear of them."""
    deliveries: int
    """Messages to be sent."""
    settled_at: float | None
    """Up to when all is packed that is to be; None where no service has kept this database in shape yet."""


def live_runs(unit: Unit, series: Series[Unit], *, running_since: float, ended_since: float, most: int) -> LiveRuns:
    """Runs that run and were heard of since the one time, or ended since the other, in the order of ids. Where there are
    too many, each project has its youngest before any has another: one that starts many does not take the room of all."""
    run = tables.run.c
    # By age, which does not change: or those that are left out would be others at each look.
    youth = (run.created_at.desc(), run.run_id)
    rows = unit.connection.execute(
        select(
            run.run_id,
            run.project,
            run.run,
            run.last_step,
            run.process_step,
            run.updated_at,
            run.stepped_at,
            run.last_attempt,
            run.last_writer,
            run.last_seq,
            func.count().over().label("num_live"),
        )
        .where(run.updated_at >= case((run.state == "running", running_since), else_=ended_since))
        .order_by(func.row_number().over(partition_by=run.project, order_by=youth), *youth)
        .limit(most)
    ).all()
    newest = [
        Address(Stream(row.run_id, row.last_attempt, row.last_writer), row.last_seq, row.last_step)
        for row in rows
        if row.last_seq is not None
    ]
    found = series.live(unit, newest)
    runs = [
        LiveRun(
            row.run_id, row.project, row.run, row.last_step, row.process_step, row.updated_at, row.stepped_at,
            *_by_writer(found.get(row.run_id, ())),
        )
        for row in sorted(rows, key=lambda row: row.run_id)
    ]  # fmt: skip
    return LiveRuns(runs, (rows[0].num_live if rows else 0) - len(rows))


def _by_writer(frames: Sequence[Measured]) -> tuple[list[Values], list[Values]]:
    """The newest frame of each writer, and the others."""
    newest: list[Values] = []
    others: list[Values] = []
    writers: set[str] = set()
    for frame in frames:
        (others if frame.writer in writers else newest).append(frame.values)
        writers.add(frame.writer)
    return newest, others


def firing_alerts(connection: Connection, now: float) -> list[FiringAlert]:
    """All that fires and is not silenced; what fires more than once on a run is named once."""
    alert = tables.alert.c
    rows = connection.execute(
        select(alert.run_id, alert.rule, alert.family, alert.severity)
        .join(tables.run, tables.run.c.run_id == alert.run_id)
        .where(alert.state == "firing", ~is_silenced())
        .distinct()
        .order_by(alert.run_id, alert.rule),
        {"now": now},
    )
    return [FiringAlert(*row) for row in rows]


def backlog(unit: Unit, series: Series[Unit]) -> Backlog:
    """Counted up to `COUNTED_AT_MOST`."""
    connection, delivery = unit.connection, tables.delivery.c
    return Backlog(
        series.backlog(unit, COUNTED_AT_MOST),
        _count(connection, tables.notice),
        _count(connection, tables.delivery, delivery.status == "waiting"),
        done_at(connection, SETTLING),
    )


def _count(connection: Connection, table: Any, *where: ColumnElement[bool]) -> int:
    found = select(literal_column("1")).select_from(table).where(*where).limit(COUNTED_AT_MOST).subquery()
    return int(connection.execute(select(func.count()).select_from(found)).scalar_one())
