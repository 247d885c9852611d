"""When the steps of a run were: from the times of its frames, a few of which are read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, and_, select, tuple_

from tsemon_server.store import schema
from tsemon_server.store.series.cells import Ints
from tsemon_server.store.series.settling import frames_of

_KEYS_PER_QUERY = 200


def seconds_at(connection: Connection, run_id: str, steps: Ints) -> NDArray[np.float64]:
    """Seconds from the run's first frame to each of these steps, in a straight line between the frames around it.

    Of frames that no later attempt hides. NaN where no frame can be read.
    """
    frame, attempt = schema.frame.c, schema.attempt.c
    hot = connection.execute(
        select(frame.step, frame.time)
        .join(
            schema.attempt,
            and_(attempt.run_id == frame.run_id, attempt.attempt == frame.attempt, attempt.hidden_from > frame.step),
        )
        .where(frame.run_id == run_id)
    ).all()
    of_settled, times = _settled(connection, run_id, steps)
    known = np.concatenate([of_settled, np.array([step for step, _ in hot], np.int64)])
    times = np.concatenate([times, np.array([time for _, time in hot], np.float64)])
    if not len(known):
        return np.full(len(steps), np.nan)
    order = np.argsort(known, kind="stable")
    known, times = known[order], times[order]
    seconds: NDArray[np.float64] = np.interp(steps, known, times) - times[0]
    return seconds


def _settled(connection: Connection, run_id: str, steps: Ints) -> tuple[Ints, NDArray[np.float64]]:
    """Steps and times of the segments that hold, or lie around, one of the steps, and of the first."""
    segment, attempt = schema.segment.c, schema.attempt.c
    of_attempt = and_(attempt.run_id == segment.run_id, attempt.attempt == segment.attempt)
    key = (segment.attempt, segment.writer, segment.number)
    rows = connection.execute(
        select(segment.first_step, segment.last_step, attempt.hidden_from, *key)
        .join(schema.attempt, of_attempt)
        .where(segment.run_id == run_id, segment.first_step < attempt.hidden_from)
        .order_by(segment.first_step, *key)
    ).all()
    found_steps, found_times = [np.empty(0, np.int64)], [np.empty(0, np.float64)]
    if rows:
        firsts, lasts, hidden_from = (np.array([row[column] for row in rows], np.int64) for column in range(3))
        before = np.maximum(np.searchsorted(firsts, steps, side="right") - 1, 0)
        after = np.minimum(before + (np.minimum(lasts, hidden_from - 1)[before] < steps), len(rows) - 1)
        wanted = np.unique(np.concatenate([[0], before, after]))
        for start in range(0, len(wanted), _KEYS_PER_QUERY):
            keys = [tuple(rows[index][3:]) for index in wanted[start : start + _KEYS_PER_QUERY]]
            query = select(schema.segment, attempt.hidden_from).join(schema.attempt, of_attempt)
            for row in connection.execute(query.where(segment.run_id == run_id, tuple_(*key).in_(keys))):
                frames = frames_of(row)
                is_visible = frames.steps < row.hidden_from
                found_steps.append(frames.steps[is_visible])
                found_times.append(frames.times[is_visible])
    return np.concatenate(found_steps), np.concatenate(found_times)
