"""The frames of many runs at one step each, in a few statements for all of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import BigInteger, Column, ColumnElement, Connection, Integer, Select, String, and_, func, select

from tsemon_server.store.engine import table_of
from tsemon_server.store.series import WINDOW_STEPS
from tsemon_server.store.series.frames import HotFrame
from tsemon_server.store.series.sql import tables
from tsemon_server.store.series.sql.rows import HOT_FRAME
from tsemon_server.store.series.sql.spans import is_of
from tsemon_server.store.streams import Address, At

_frame = tables.frame
_STEP = table_of("steps", run_id=String, step=BigInteger, attempt=Integer)
HotFrames = Iterator[tuple[str, Sequence[HotFrame]]]
"""By run."""


def hot_at(connection: Connection, steps: Mapping[str, At]) -> HotFrames:
    """Hot frames of one step of each run, by writer and seq."""
    at = and_(
        _frame.c.run_id == _STEP.c.run_id, _frame.c.step == _STEP.c.step, _is_of(_frame.c.attempt, _STEP.c.attempt)
    )
    query = select(_frame.c.run_id, *HOT_FRAME).join(_STEP, at)
    return _by_run(connection, query.order_by(_frame.c.run_id, _frame.c.writer, _frame.c.seq), steps)


def settled_at(connection: Connection, steps: Mapping[str, At]) -> Collection[str]:
    """Runs of which something at their step may have settled."""
    c = tables.segment.c
    holds_it = (c.last_step >= _STEP.c.step, c.first_step <= _STEP.c.step)
    of_run = and_(c.run_id == _STEP.c.run_id, c.attempt == _STEP.c.attempt, *holds_it)
    query = select(c.run_id).join(_STEP, of_run).distinct()
    return connection.execute(query, {"steps": _values_of(steps)}).scalars().all()


def newest_hot(connection: Connection, newest: Sequence[Address]) -> HotFrames:
    """Of each run the newest frame of each writer and layout among those of the last few steps, the newest first."""
    steps = {address.stream.run_id: At(address.step, address.stream.attempt) for address in newest}
    return _by_run(connection, _NEWEST, steps)


def is_hot(connection: Connection, frame: Address) -> bool:
    """Whether the frame has not settled."""
    query = select(_frame.c.seq).where(is_of(frame.stream, _frame), _frame.c.seq == frame.seq)
    return connection.execute(query).first() is not None


def _by_run(connection: Connection, query: Select[Any], steps: Mapping[str, At]) -> HotFrames:
    rows = connection.execute(query, {"steps": _values_of(steps)}) if steps else ()
    for run_id, group in groupby(rows, key=attrgetter("run_id")):
        yield run_id, [HotFrame._make(row[1:]) for row in group]


def _values_of(steps: Mapping[str, At]) -> str:
    return json.dumps([(run_id, *at) for run_id, at in steps.items()])


def _newest_frames() -> Select[Any]:
    earlier = _frame.alias("earlier")
    first = (
        select(earlier.c.step)
        .where(earlier.c.run_id == _STEP.c.run_id, _is_of(earlier.c.attempt, _STEP.c.attempt))
        .where(earlier.c.step <= _STEP.c.step)
        .distinct()
        .order_by(earlier.c.step.desc())
        .limit(1)
        .offset(WINDOW_STEPS - 1)
        .correlate(_STEP)
        .scalar_subquery()
    )
    # Apart, or PostgreSQL looks it up again for each frame of the run.
    window = select(*_STEP.c, func.coalesce(first, 0).label("first_step")).cte("within").prefix_with("MATERIALIZED")
    place = func.row_number().over(
        partition_by=(_frame.c.run_id, _frame.c.writer, _frame.c.layout_id),
        order_by=(_frame.c.step.desc(), _frame.c.seq.desc()),
    )
    key = tuple(tables.frame.primary_key)
    recent = (
        select(*key, place.label("place"))
        .select_from(window)
        .join(
            _frame,
            and_(
                _frame.c.run_id == window.c.run_id,
                _is_of(_frame.c.attempt, window.c.attempt),
                _frame.c.step.between(window.c.first_step, window.c.step),
            ),
        )
        .subquery("recent")
    )
    return (
        select(_frame.c.run_id, *HOT_FRAME)
        .select_from(recent)
        .join(_frame, and_(*(column == recent.c[column.name] for column in key)))
        .where(recent.c.place == 1)
        .order_by(_frame.c.run_id, _frame.c.step.desc(), _frame.c.seq.desc(), _frame.c.writer.desc())
    )


def _is_of(attempt: Column[int], wanted: ColumnElement[int]) -> ColumnElement[bool]:
    """Whether a frame is of this attempt. Written so that no engine looks for it in an index: that of steps is the one
    that leads to the last few frames, others lead to all of them."""
    number: ColumnElement[int] = attempt + 0
    return number == wanted


_NEWEST = _newest_frames()
