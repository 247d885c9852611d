"""The visible intervals, as a table that a statement joins with."""

from __future__ import annotations

import json

from sqlalchemy import BigInteger, ColumnElement, Integer, Table, and_

from tsemon_server.store.engine import table_of
from tsemon_server.store.streams import Stream, Visible

SPAN = table_of("visible", attempt=Integer, from_step=BigInteger, to_step=BigInteger)
"""One row per span. Its values come with each execution, as `visible`."""


def values_of(visible: Visible) -> str:
    """Spans as that parameter."""
    return json.dumps(visible)


def has_frame(frame: Table) -> ColumnElement[bool]:
    """Whether the span holds a hot frame."""
    return and_(SPAN.c.attempt == frame.c.attempt, frame.c.step.between(SPAN.c.from_step, SPAN.c.to_step))


def overlaps(packed: Table) -> ColumnElement[bool]:
    """Whether the span and a segment, chunk or block may share a step."""
    return and_(
        SPAN.c.attempt == packed.c.attempt,
        packed.c.last_step >= SPAN.c.from_step,
        packed.c.first_step <= SPAN.c.to_step,
    )


def holds(packed: Table) -> ColumnElement[bool]:
    """Whether all of a chunk or block is within the span."""
    return and_(packed.c.first_step >= SPAN.c.from_step, packed.c.last_step <= SPAN.c.to_step)


def is_of(stream: Stream, table: Table) -> ColumnElement[bool]:
    """Whether a row is of the stream."""
    c = table.c
    return and_(c.run_id == stream.run_id, c.attempt == stream.attempt, c.writer == stream.writer)
