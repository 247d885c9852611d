"""How long a project keeps what it has, and what is too old for it.

Time runs from when frames settled, and from when a run was last heard of, by the clock of the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, bindparam, literal, or_, select, update

from tsemon_server.store import schema
from tsemon_server.store.ledger.purging import forget_run

TO_COME_BACK_S = 86_400.0
"""So long after its start the service waits for trainers before it takes them for gone."""

Finest = Literal["samples", "fine", "coarse"]


class Retention(NamedTuple):
    """Ages in seconds; None keeps for ever."""

    project: str
    samples_s: float | None = None
    """Age at which charts lose single samples, and see rollups of about 16."""
    rollups_s: float | None = None
    """Age at which they lose those too, and see rollups of about 128, which stay as long as the run."""
    runs_s: float | None = None
    """Age at which a run is deleted."""


class Aged(NamedTuple):
    """A segment that keeps more than it should."""

    run_id: str
    attempt: int
    writer: str
    number: int


def retentions(connection: Connection) -> list[Retention]:
    c = schema.retention.c
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
    run = schema.run.c
    is_aged = _is_aged(retention.runs_s, now, listening_since)
    return list(connection.execute(select(run.run_id).where(run.project == retention.project, is_aged)).scalars())


def forget_aged(connection: Connection, run_id: str, retention: Retention, now: float, listening_since: float) -> bool:
    """Delete the run, unless it was heard of in the meantime."""
    assert retention.runs_s is not None
    return forget_run(connection, run_id, _is_aged(retention.runs_s, now, listening_since))


def _is_aged(age_s: float, now: float, listening_since: float) -> ColumnElement[bool]:
    """Of a run that did not end, silence counts only while somebody listened: its trainer may wait for the service."""
    run = schema.run.c
    has_had_time = now - listening_since > min(age_s, TO_COME_BACK_S)
    return and_(run.updated_at < now - age_s, or_(run.state != "running", literal(has_had_time)))


def aged_segments(connection: Connection, retention: Retention, now: float) -> dict[Aged, Finest]:
    """Segments that are to be reduced, and to what."""
    found: dict[Aged, Finest] = dict.fromkeys(
        _settled_before(connection, retention.project, retention.samples_s, now, ["samples"]), "fine"
    )
    aged = _settled_before(connection, retention.project, retention.rollups_s, now, ["samples", "fine"])
    return {**found, **dict.fromkeys(aged, "coarse")}


def _settled_before(
    connection: Connection, project: str, age_s: float | None, now: float, finest: Sequence[Finest]
) -> list[Aged]:
    if age_s is None:
        return []
    segment, run = schema.segment.c, schema.run.c
    rows = connection.execute(
        select(segment.run_id, segment.attempt, segment.writer, segment.number).where(
            segment.finest.in_(finest),
            segment.settled_at < now - age_s,
            segment.run_id.in_(select(run.run_id).where(run.project == project)),
        )
    )
    return [Aged(*row) for row in rows]


def reduce_segment(connection: Connection, aged: Aged, left: Finest) -> None:
    """Drop what is finer than `left`."""
    dropped = {"samples": None} if left == "fine" else {"samples": None, "fine": None}
    layout = schema.layout.c
    # By whole keys, one per metric: the number of the segment is at their end.
    metrics = connection.execute(select(layout.kind, layout.metric).where(layout.run_id == aged.run_id).distinct())
    keys = [
        {"which_kind": kind, "which_metric": metric, **{f"which_{name}": key for name, key in aged._asdict().items()}}
        for kind, metric in metrics
    ]
    if keys:
        connection.execute(_CHUNKS.values(dropped), keys)
    is_it = (column == key for column, key in zip(schema.segment.primary_key, aged, strict=True))
    connection.execute(update(schema.segment).where(*is_it).values(finest=left))


def _is_in_chunk(name: str) -> ColumnElement[bool]:
    return schema.chunk.c[name] == bindparam(f"which_{name}")


_CHUNKS = update(schema.chunk).where(*map(_is_in_chunk, ("kind", "metric", *Aged._fields)))
