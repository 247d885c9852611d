"""The newest values of each run that is live, for those who look at all of them at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, case, func, literal_column, select

from tsemon_server.store import schema
from tsemon_server.store.chunks import DamagedChunk, unpack_samples
from tsemon_server.store.leases import SETTLING, done_at
from tsemon_server.store.packing import Kind, Layout, unpack
from tsemon_server.store.settling import find_settled, layouts_of
from tsemon_server.store.silences import is_silenced
from tsemon_server.store.streams import Stream

WINDOW_STEPS = 32
"""The frames of so many of the newest steps of a run are looked at: what is measured at each tenth sample only is among
them, however many writers a step has frames of."""
COUNTED_AT_MOST = 200_000
"""What is more than that is not counted on: nobody waits for the count of a table that has grown without end."""

log = logging.getLogger(__name__)

Layouts = MutableMapping[tuple[str, int], Layout]
"""By run and id. They never change: whoever looks again and again keeps them."""
Values = dict[Kind, dict[str, NDArray[np.floating[Any]]]]


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


def live_runs(
    connection: Connection, *, running_since: float, ended_since: float, most: int, layouts: Layouts
) -> LiveRuns:
    """Runs that run and were heard of since the one time, or ended since the other, in the order of ids. Where there are
    too many, each project has its youngest before any has another: one that starts many does not take the room of all."""
    run = schema.run.c
    # By age, which does not change: or those that are left out would be others at each look.
    youth = (run.created_at.desc(), run.run_id)
    rows = connection.execute(
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
    frames: dict[str, list[Row[Any]]] = {}
    if rows:
        for frame in connection.execute(_NEWEST_FRAMES, {"run_ids": [row.run_id for row in rows]}):
            frames.setdefault(frame.run_id, []).append(frame)
    found = [
        LiveRun(
            row.run_id, row.project, row.run, row.last_step, row.process_step, row.updated_at, row.stepped_at,
            *_values_of(connection, row, frames.get(row.run_id, ()), layouts),
        )
        for row in sorted(rows, key=lambda row: row.run_id)
    ]  # fmt: skip
    return LiveRuns(found, (rows[0].num_live if rows else 0) - len(rows))


def firing_alerts(connection: Connection, now: float) -> list[FiringAlert]:
    """All that fires and is not silenced; what fires more than once on a run is named once."""
    alert = schema.alert.c
    rows = connection.execute(
        select(alert.run_id, alert.rule, alert.family, alert.severity)
        .join(schema.run, schema.run.c.run_id == alert.run_id)
        .where(alert.state == "firing", ~is_silenced())
        .distinct()
        .order_by(alert.run_id, alert.rule),
        {"now": now},
    )
    return [FiringAlert(*row) for row in rows]


def backlog(connection: Connection) -> Backlog:
    """Counted up to `COUNTED_AT_MOST`."""
    delivery = schema.delivery.c
    return Backlog(
        _count(connection, schema.frame),
        _count(connection, schema.notice),
        _count(connection, schema.delivery, delivery.status == "waiting"),
        done_at(connection, SETTLING),
    )


def _count(connection: Connection, table: Any, *where: ColumnElement[bool]) -> int:
    found = select(literal_column("1")).select_from(table).where(*where).limit(COUNTED_AT_MOST).subquery()
    return int(connection.execute(select(func.count()).select_from(found)).scalar_one())


def _newest_frames() -> Any:
    """Of some runs, the newest frame of each writer and layout among those of the last few steps, the newest first."""
    run, frame, earlier = schema.run.c, schema.frame, schema.frame.alias("earlier")
    first = (
        select(earlier.c.step)
        .where(earlier.c.run_id == run.run_id, _is_of(earlier, run.last_attempt), earlier.c.step <= run.last_step)
        .distinct()
        .order_by(earlier.c.step.desc())
        .limit(1)
        .offset(WINDOW_STEPS - 1)
        .correlate(schema.run)
        .scalar_subquery()
    )
    # Apart, or PostgreSQL looks it up again for each frame of the run.
    window = (
        select(run.run_id, run.last_attempt, run.last_step, func.coalesce(first, 0).label("first_step"))
        .where(run.run_id.in_(bindparam("run_ids", expanding=True)))
        .cte("within")
        .prefix_with("MATERIALIZED")
    )
    place = func.row_number().over(
        partition_by=(frame.c.run_id, frame.c.writer, frame.c.layout_id),
        order_by=(frame.c.step.desc(), frame.c.seq.desc()),
    )
    recent = (
        select(frame.c.run_id, frame.c.attempt, frame.c.writer, frame.c.seq, place.label("place"))
        .select_from(window)
        .join(
            frame,
            and_(
                frame.c.run_id == window.c.run_id,
                _is_of(frame, window.c.last_attempt),
                frame.c.step.between(window.c.first_step, window.c.last_step),
            ),
        )
        .subquery("recent")
    )
    return (
        select(frame)
        .select_from(recent)
        .join(
            frame,
            and_(
                frame.c.run_id == recent.c.run_id,
                frame.c.attempt == recent.c.attempt,
                frame.c.writer == recent.c.writer,
                frame.c.seq == recent.c.seq,
            ),
        )
        .where(recent.c.place == 1)
        .order_by(frame.c.run_id, frame.c.step.desc(), frame.c.seq.desc(), frame.c.writer.desc())
    )


def _is_of(frame: Any, attempt: ColumnElement[int | None]) -> ColumnElement[bool]:
    """Whether a frame is of this attempt. Written so that no engine looks for it in an index: that of steps is the one
    that leads to the last few frames, others lead to all of them."""
    number: ColumnElement[int] = frame.c.attempt + 0
    return number == attempt


_NEWEST_FRAMES = _newest_frames()


def _values_of(
    connection: Connection, run: Row[*tuple[Any, ...]], frames: Sequence[Row[Any]], layouts: Layouts
) -> tuple[list[Values], list[Values]]:
    if run.last_seq is None:
        return [], []
    is_there = any(frame.writer == run.last_writer and frame.seq == run.last_seq for frame in frames)
    if not is_there and not _is_hot(connection, run):  # later ones were hidden, and this one had settled
        stream = Stream(run.run_id, run.last_attempt, run.last_writer)
        return [settled_values(connection, stream, run.last_step, run.last_seq)[1]], []
    newest: list[Values] = []
    others: list[Values] = []
    writers: set[str] = set()
    for frame in frames:
        layout = _layout(connection, run.run_id, frame.layout_id, layouts)
        if not layout.is_sound(frame):
            log.error("a frame of run %s is damaged; `tsemon admin check` lists them all", run.run_id)
            continue
        (others if frame.writer in writers else newest).append(unpack(layout, frame.blob))
        writers.add(frame.writer)
    return newest, others


def _is_hot(connection: Connection, run: Row[*tuple[Any, ...]]) -> bool:
    stream = Stream(run.run_id, run.last_attempt, run.last_writer)
    query = select(schema.frame.c.seq).where(stream.of(schema.frame), schema.frame.c.seq == run.last_seq)
    return connection.execute(query).first() is not None


def _layout(connection: Connection, run_id: str, layout_id: int, layouts: Layouts) -> Layout:
    found = layouts.get((run_id, layout_id))
    if found is None:
        found = layouts[run_id, layout_id] = layouts_of(connection, run_id, {layout_id})[layout_id]
    return found


def settled_values(
    connection: Connection, stream: Stream, step: int, seq: int, kinds: Iterable[Kind] = ("scalars", "layers", "heads")
) -> tuple[float, Values]:
    """When a settled frame was made, and what it holds. What retention has dropped is not in it."""
    number, time = find_settled(connection, stream, step, seq)
    c = schema.chunk.c
    values: Values = {"scalars": {}, "layers": {}, "heads": {}}
    for kind in kinds:
        chunks = connection.execute(
            select(c.metric, c.samples, c.num_samples, c.num_rows, c.num_columns)
            .where(stream.of(schema.chunk), c.number == number, c.kind == kind)
            .where(c.samples.is_not(None))
        )
        for metric, packed, num_samples, num_rows, num_columns in chunks:
            with suppress(DamagedChunk):  # charts of the metric tell
                steps, samples = unpack_samples(packed, kind, num_samples, num_rows * num_columns)
                if len(found := samples[steps == step]):
                    values[kind][metric] = found[-1].reshape(_shape(kind, num_rows, num_columns))
    return time, values


def _shape(kind: Kind, num_rows: int, num_columns: int) -> tuple[int, ...]:
    shapes: Mapping[Kind, tuple[int, ...]] = {"scalars": (), "layers": (num_rows,), "heads": (num_rows, num_columns)}
    return shapes[kind]
