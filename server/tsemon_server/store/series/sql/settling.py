"""Moves settled frames from their rows into a segment, and removes expired and deleted data.

Packing goes on outside of any transaction. The one that follows replaces exactly the rows that were packed, or does
nothing: so it may be killed at any point, and two that do the same work do not harm each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, bindparam, delete, func, insert, select, tuple_, update

from tsemon_server.store.series import Left
from tsemon_server.store.series.blocks import CHUNKS_PER_BLOCK, blocks_of
from tsemon_server.store.series.frames import HotFrame
from tsemon_server.store.series.settling import PAGE_BYTES, PAGE_SEQS, Segment, marked
from tsemon_server.store.series.sql import tables
from tsemon_server.store.series.sql.rows import HOT_FRAME
from tsemon_server.store.series.sql.spans import is_of
from tsemon_server.store.streams import Stream

_KEYS_PER_QUERY = 500
SLICE_ROWS = {"frame": 500, "chunk": 20, "block": 100, "segment": 500, "settled": 500}
"""So many rows of each table go in one transaction, for which writers wait: a chunk may take a megabyte."""

_frame, _segment, _chunk = tables.frame.c, tables.segment.c, tables.chunk.c


class FramesChanged(Exception):
    """The frames to be replaced are not those that were packed."""


def hot_streams(connection: Connection) -> list[tuple[Stream, int]]:
    """Streams with more than one hot frame, and how many."""
    key = (_frame.run_id, _frame.attempt, _frame.writer)
    rows = connection.execute(select(*key, func.count()).group_by(*key).having(func.count() > 1).order_by(*key))
    return [(Stream(*names), num_frames) for *names, num_frames in rows]


def oldest_frames(connection: Connection, stream: Stream, most: int, but: int | None) -> list[HotFrame]:
    """The oldest hot frames of the stream up to a number, without the frame of one seq."""
    query = select(*HOT_FRAME).where(is_of(stream, tables.frame)).order_by(_frame.seq).limit(most)
    if but is not None:
        query = query.where(_frame.seq != but)
    return [HotFrame._make(row) for row in connection.execute(query)]


def replace_frames(connection: Connection, segment: Segment, now: float) -> None:
    """Put the segment in place of its frames. Raises FramesChanged where those are not there any more."""
    stream = segment.stream
    # Whoever stores frames of the run waits here, and finds each frame either in its row or in `settled`.
    connection.execute(select(tables.tally).where(tables.tally.c.run_id == stream.run_id).with_for_update())
    num_deleted = 0
    for start in range(0, len(segment.seqs), _KEYS_PER_QUERY):
        seqs = segment.seqs[start : start + _KEYS_PER_QUERY]
        where = is_of(stream, tables.frame) & _frame.seq.in_(seqs)
        num_deleted += connection.execute(delete(tables.frame).where(where)).rowcount
    if num_deleted != len(segment.seqs):
        raise FramesChanged
    last = connection.execute(select(func.max(_segment.number)).where(is_of(stream, tables.segment))).scalar_one()
    number = 0 if last is None else last + 1
    about = {"number": number, "num_chunks": len(segment.chunks), "settled_at": now, "finest": "samples"}
    connection.execute(insert(tables.segment).values(**segment.row, **about))
    if segment.chunks:
        connection.execute(insert(tables.chunk), [{**chunk, "number": number} for chunk in segment.chunks])
    _mark_settled(connection, stream, segment.seqs)
    if number % CHUNKS_PER_BLOCK == CHUNKS_PER_BLOCK - 1:
        _add_blocks(connection, stream, number // CHUNKS_PER_BLOCK)


def _mark_settled(connection: Connection, stream: Stream, seqs: Sequence[int]) -> None:
    c = tables.settled.c
    for page, group in groupby(sorted(seqs), key=lambda seq: seq // PAGE_SEQS):
        where = is_of(stream, tables.settled) & (c.page == page)
        known = connection.execute(select(c.seqs).where(where)).scalar_one_or_none()
        changed = marked(bytes(PAGE_BYTES) if known is None else known, group)
        if known is None:
            connection.execute(insert(tables.settled).values(**stream._asdict(), page=page, seqs=changed))
        else:
            connection.execute(update(tables.settled).where(where).values(seqs=changed))


def _add_blocks(connection: Connection, stream: Stream, number: int) -> None:
    blocks = blocks_of(coarse_rollups(connection, stream, number))
    if blocks:
        rows = [{**stream._asdict(), "number": number, **block} for block in blocks]
        connection.execute(insert(tables.block), rows)


def coarse_rollups(connection: Connection, stream: Stream, number: int, *only: ColumnElement[bool]) -> Sequence[Any]:
    """Of the chunks of this number of block, by kind and metric."""
    first = number * CHUNKS_PER_BLOCK
    about = (_chunk.kind, _chunk.metric, _chunk.num_rows, _chunk.num_columns, _chunk.num_samples)
    return connection.execute(
        select(*about, _chunk.coarse_shift, _chunk.coarse_crc, _chunk.coarse_cells, _chunk.coarse)
        .where(is_of(stream, tables.chunk), _chunk.number >= first, _chunk.number < first + CHUNKS_PER_BLOCK, *only)
        .order_by(_chunk.kind, _chunk.metric)
    ).all()


# -- what nobody wants any more


def _is_aged(left: Left, settled_before: float) -> ColumnElement[bool]:
    finer = ("samples",) if left == "fine" else ("samples", "fine")
    return _segment.finest.in_(finer) & (_segment.settled_at < settled_before)


def runs_to_reduce(connection: Connection, left: Left, settled_before: float) -> Collection[str]:
    """Runs with a segment that settled before and holds more than is to be left."""
    query = select(_segment.run_id).where(_is_aged(left, settled_before)).distinct()
    return connection.execute(query).scalars().all()


def segments_to_reduce(
    connection: Connection, run_id: str, left: Left, settled_before: float
) -> list[tuple[Stream, int]]:
    """Such segments of a run."""
    key = (_segment.run_id, _segment.attempt, _segment.writer)
    query = select(*key, _segment.number).where(_segment.run_id == run_id, _is_aged(left, settled_before))
    return [(Stream(*names), number) for *names, number in connection.execute(query)]


def reduce_segment(connection: Connection, stream: Stream, number: int, left: Left) -> None:
    """Drop what is finer than `left`."""
    dropped = {"samples": None} if left == "fine" else {"samples": None, "fine": None}
    c = tables.layout.c
    # By whole keys, one per metric: the number of the segment is at their end.
    metrics = connection.execute(select(c.kind, c.metric).where(c.run_id == stream.run_id).distinct())
    keys = [{"which_kind": kind, "which_metric": metric, "which_number": number} for kind, metric in metrics]
    if keys:
        which = (_chunk.kind == bindparam("which_kind"), _chunk.metric == bindparam("which_metric"))
        reduced = update(tables.chunk).where(*which, _chunk.number == bindparam("which_number"))
        connection.execute(reduced.where(is_of(stream, tables.chunk)).values(dropped), keys)
    is_it = is_of(stream, tables.segment) & (_segment.number == number)
    connection.execute(update(tables.segment).where(is_it).values(finest=left))


def remove_slice(connection: Connection, run_id: str) -> int:
    """Remove some rows of a run; 0 where none are left that may be many. What is small goes then."""
    for table in tables.ALL:
        if table.name in SLICE_ROWS and (num := _remove_some(connection, table, run_id)):
            return num
    for table in (tables.layout, tables.tally):
        connection.execute(delete(table).where(table.c.run_id == run_id))
    return 0


def _remove_some(connection: Connection, table: Table, run_id: str) -> int:
    is_of_run = table.c.run_id == run_id
    key = tuple(table.primary_key)
    some = select(*key).where(is_of_run).limit(SLICE_ROWS[table.name])
    return connection.execute(delete(table).where(is_of_run, tuple_(*key).in_(some))).rowcount
