"""Which frame is the nearest to a step, without reading what the frames hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, Select, Table, and_, case, literal, select

from tsemon_server.store import schema
from tsemon_server.store.series.settling import frames_of
from tsemon_server.store.streams import Stream


class At(NamedTuple):
    """A step that an attempt has a frame of."""

    step: int
    attempt: int


def nearest_frame(connection: Connection, run_id: str, step: int | None, attempt: int | None) -> At | None:
    """The nearest frame to `step`, else the newest one: of this attempt, or of what no later attempt hides.

    Of two that are as near the earlier one, of several attempts that have it the last. What retention has reduced to
    rollups has no frames any more.
    """
    wanted = schema.NEVER if step is None else step

    def rank(at: At) -> tuple[int, int, int]:
        return abs(at.step - wanted), at.step, -at.attempt

    nearest = min(_hot(connection, run_id, wanted, attempt), key=rank, default=None)
    for gap, found in _settled(connection, run_id, wanted, attempt):
        if nearest is not None and gap > abs(nearest.step - wanted):
            break
        nearest = min((at for at in (nearest, *found) if at is not None), key=rank, default=None)
    return nearest


def _hot(connection: Connection, run_id: str, wanted: int, attempt: int | None) -> Iterator[At]:
    """The nearest before and after."""
    c = schema.frame.c
    query = _seen(select(c.step, c.attempt), schema.frame, attempt).where(c.run_id == run_id).limit(1)
    if attempt is None:
        query = query.where(schema.attempt.c.hidden_from > c.step)
    for nearest in (
        query.where(c.step <= wanted).order_by(c.step.desc(), c.attempt.desc()),
        query.where(c.step > wanted).order_by(c.step, c.attempt.desc()),
    ):
        yield from (At(*row) for row in connection.execute(nearest))


def _settled(
    connection: Connection, run_id: str, wanted: int, attempt: int | None
) -> Iterator[tuple[int, Iterator[At]]]:
    """Segment by segment, the nearest first: how far away it is at least, and the nearest of its frames."""
    c = schema.segment.c
    hidden_from = literal(schema.NEVER) if attempt is not None else schema.attempt.c.hidden_from
    reach = case((c.last_step < hidden_from, c.last_step), else_=hidden_from - 1)
    gap = case((c.first_step > wanted, c.first_step - wanted), (reach < wanted, wanted - reach), else_=0)
    query = _seen(select(c.attempt, c.writer, c.number, hidden_from, gap), schema.segment, attempt).where(
        c.run_id == run_id, c.first_step < hidden_from, c.finest == "samples"
    )
    for of_attempt, writer, number, hidden, distance in connection.execute(query.order_by(gap)).all():
        stream = Stream(run_id, of_attempt, writer)
        yield distance, _of_segment(connection, stream, number, hidden, wanted)


def _of_segment(connection: Connection, stream: Stream, number: int, hidden_from: int, wanted: int) -> Iterator[At]:
    c = schema.segment.c
    segment = connection.execute(select(schema.segment).where(stream.of(schema.segment), c.number == number)).one()
    steps = frames_of(segment).steps
    steps = steps[steps < hidden_from]
    place = int(np.searchsorted(steps, wanted))
    yield from (At(int(step), stream.attempt) for step in steps[max(0, place - 1) : place + 1])


def _seen(query: Select[Any], table: Table, attempt: int | None) -> Select[Any]:
    """Of this attempt, or with what is known of each."""
    if attempt is not None:
        return query.where(table.c.attempt == attempt)
    c = schema.attempt.c
    return query.join(schema.attempt, and_(c.run_id == table.c.run_id, c.attempt == table.c.attempt))
