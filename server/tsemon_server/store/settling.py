"""Moves settled frames from their rows into chunks: a few hundred frames of one writer at a time.

Packing goes on outside of any transaction. The one that follows replaces exactly the rows that were packed, or does
nothing: so it may be killed at any point, and two that do the same work do not harm each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, case, delete, func, insert, or_, select, update

from tsemon_server.store import schema
from tsemon_server.store.blocks import CHUNKS_PER_BLOCK, add_block
from tsemon_server.store.cells import Floats
from tsemon_server.store.chunks import DamagedChunk, Frames, pack_chunk, pack_frames, unpack_frames
from tsemon_server.store.packing import Kind, Layout, Slot, item_type
from tsemon_server.store.streams import Stream

PAGE_SEQS = 512
"""Seqs in one row of `settled`."""
_KEYS_PER_QUERY = 500

log = logging.getLogger(__name__)


class Sizes(NamedTuple):
    """How many frames of one writer move, and how many stay."""

    segment: int = 512
    """Frames of one segment, where there are as many."""
    kept: int = 64
    """So many of the newest stay behind: late ones find their neighbours, and short runs are no chunks of nothing."""


class NewestFrame(NamedTuple):
    """A frame, by what makes it newer than others."""

    step: int
    attempt: int
    seq: int
    writer: str


class FramesChanged(Exception):
    """The frames to be replaced are not those that were packed."""


class Segment(NamedTuple):
    """Settled frames, packed."""

    stream: Stream
    seqs: Sequence[int]
    row: dict[str, Any]
    chunks: list[dict[str, Any]]


def settled_streams(connection: Connection, silent_before: float, sizes: Sizes) -> list[tuple[Stream, int]]:
    """Whose frames can be packed, into how many segments.

    A run that ended, or was not heard of since `silent_before`, sends no more.
    """
    frame, run = schema.frame.c, schema.run.c
    has_ended = or_(run.state != "running", run.updated_at < silent_before, run.attempt != frame.attempt)
    rows = connection.execute(
        select(frame.run_id, frame.attempt, frame.writer, func.count(), has_ended)
        .join(schema.run, run.run_id == frame.run_id)
        .group_by(frame.run_id, frame.attempt, frame.writer, run.state, run.updated_at, run.attempt)
        .having(func.count() > case((has_ended, 1), else_=sizes.kept))
        .order_by(frame.run_id, frame.attempt, frame.writer)
    )
    return [
        (Stream(*names), num_segments)
        for *names, num_frames, is_over in rows
        if (num_segments := -(-num_frames // sizes.segment) if is_over else (num_frames - sizes.kept) // sizes.segment)
    ]


def pack_segment(connection: Connection, stream: Stream, most: int) -> Segment | None:
    """At most so many of the oldest frames of the stream, packed; None where there are none to spare."""
    frame = schema.frame.c
    rows = connection.execute(
        select(frame.seq, frame.step, frame.time, frame.layout_id, frame.blob, frame.crcs)
        .where(stream.of(schema.frame), ~_is_newest(stream))
        .order_by(frame.seq)
        .limit(most)
    ).all()
    layouts = layouts_of(connection, stream.run_id, {row.layout_id for row in rows})
    # A frame whose row is damaged stays where it is, for `check` to find.
    rows = [row for row in rows if layouts[row.layout_id].is_sound(row)]
    if not rows:
        return None
    rows.sort(key=lambda row: (row.step, row.seq))
    seqs, steps = ([row[column] for row in rows] for column in (0, 1))
    times = np.array([row.time for row in rows], "<f8")
    return Segment(
        stream,
        seqs,
        {
            **stream._asdict(),
            "num_frames": len(rows),
            "first_step": steps[0],
            "last_step": steps[-1],
            "frames": pack_frames(Frames(np.array(seqs, np.int64), np.array(steps, np.int64), times)),
        },
        list(_chunks(stream, rows, layouts)),
    )


def replace_frames(connection: Connection, segment: Segment, now: float) -> None:
    """Put the segment in place of its frames. Raises FramesChanged where those are not there any more."""
    stream = segment.stream
    # Whoever stores frames of the run waits here, and finds each frame either in its row or in `settled`.
    is_there = select(schema.run.c.run_id).where(schema.run.c.run_id == stream.run_id).with_for_update()
    if connection.execute(is_there).one_or_none() is None:
        raise FramesChanged
    num_deleted = 0
    for start in range(0, len(segment.seqs), _KEYS_PER_QUERY):
        seqs = segment.seqs[start : start + _KEYS_PER_QUERY]
        where = stream.of(schema.frame) & schema.frame.c.seq.in_(seqs) & ~_is_newest(stream)
        num_deleted += connection.execute(delete(schema.frame).where(where)).rowcount
    if num_deleted != len(segment.seqs):
        raise FramesChanged
    last = connection.execute(select(func.max(schema.segment.c.number)).where(stream.of(schema.segment))).scalar_one()
    number = 0 if last is None else last + 1
    about = {"number": number, "num_chunks": len(segment.chunks), "settled_at": now, "finest": "samples"}
    connection.execute(insert(schema.segment).values(**segment.row, **about))
    if segment.chunks:
        connection.execute(insert(schema.chunk), [{**chunk, "number": number} for chunk in segment.chunks])
    _mark_settled(connection, stream, segment.seqs)
    if number % CHUNKS_PER_BLOCK == CHUNKS_PER_BLOCK - 1:
        add_block(connection, stream, number // CHUNKS_PER_BLOCK)


def newest_settled(connection: Connection, run_id: str) -> list[NewestFrame]:
    """The newest settled frame that no later attempt hides, or none."""
    segment, attempt = schema.segment.c, schema.attempt.c
    reach = case((segment.last_step < attempt.hidden_from, segment.last_step), else_=attempt.hidden_from - 1)
    rows = connection.execute(
        select(schema.segment, attempt.hidden_from, reach.label("reach"))
        .join(schema.attempt, (attempt.run_id == segment.run_id) & (attempt.attempt == segment.attempt))
        .where(segment.run_id == run_id, segment.first_step < attempt.hidden_from)
        .order_by(reach.desc())
    )
    newest: list[NewestFrame] = []
    for row in rows:
        if newest and row.reach < newest[0].step:
            break
        frames = frames_of(row)
        visible = np.flatnonzero(frames.steps < row.hidden_from)
        if len(visible):
            last = visible[-1]
            found = NewestFrame(int(frames.steps[last]), row.attempt, int(frames.seqs[last]), row.writer)
            newest = [max(*newest, found) if newest else found]
    return newest


def find_settled(connection: Connection, stream: Stream, step: int, seq: int) -> tuple[int, float]:
    """The number of the segment that holds this frame, and the frame's time: 0.0 where that cannot be read."""
    c = schema.segment.c
    candidates = connection.execute(
        select(schema.segment).where(stream.of(schema.segment), c.first_step <= step, c.last_step >= step)
    ).all()
    for row in candidates:
        frames = frames_of(row)
        for time in frames.times[frames.seqs == seq]:
            return row.number, float(time)
    return candidates[0].number, 0.0


def frames_of(row: Row[Any]) -> Frames:
    """The frames of a segment; none, and a word to the log, where they cannot be read."""
    try:
        return unpack_frames(row.frames, row.num_frames)
    except DamagedChunk:
        log.error(
            "the list of frames of run %s, attempt %d, writer %s, segment %d is damaged; "
            "`tsemon admin check` lists them all",
            row.run_id, row.attempt, row.writer, row.number,
        )  # fmt: skip
        return Frames(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


def seqs_of_page(page: int, marked: bytes) -> Iterator[int]:
    """The seqs that a row of `settled` tells of."""
    bits = int.from_bytes(marked, "little")
    return (page * PAGE_SEQS + bit for bit in range(PAGE_SEQS) if bits >> bit & 1)


def _is_newest(stream: Stream) -> Any:
    """Whether a frame is the newest of its run: that one stays, for those who want to know how the run is now."""
    run, frame = schema.run.c, schema.frame.c
    return (
        select(run.run_id)
        .where(
            run.run_id == stream.run_id,
            run.last_attempt == frame.attempt,
            run.last_writer == frame.writer,
            run.last_seq == frame.seq,
        )
        .exists()
    )


def layouts_of(connection: Connection, run_id: str, numbers: set[int]) -> Mapping[int, Layout]:
    c = schema.layout.c
    found: dict[int, Layout] = {}
    for number in numbers:
        rows = connection.execute(
            select(c.kind, c.metric, c.offset_bytes, c.num_rows, c.num_columns).where(
                c.run_id == run_id, c.layout_id == number
            )
        )
        found[number] = Layout.of(Slot(*row) for row in rows)
    return found


class Column(NamedTuple):
    """One metric in one shape over some frames."""

    kind: Kind
    metric: str
    num_rows: int
    num_columns: int
    which: NDArray[np.intp]
    """Indexes of the frames, ascending."""
    values: Floats
    """(frames, rows * columns)"""


def columns_of(rows: Sequence[Row[*tuple[Any, ...]]], layouts: Mapping[int, Layout]) -> Iterator[Column]:
    """What frames with these blobs hold, metric by metric."""
    pieces: dict[tuple[Kind, str, int, int], list[tuple[NDArray[np.intp], Floats]]] = {}
    by_layout = sorted(range(len(rows)), key=lambda index: (rows[index].layout_id, index))
    for layout_id, group in groupby(by_layout, key=lambda index: rows[index].layout_id):
        which = np.array(list(group), np.intp)
        blobs = np.frombuffer(b"".join(rows[index].blob for index in which), np.uint8)
        blobs = blobs.reshape(len(which), len(rows[which[0]].blob))
        for slot in layouts[layout_id].slots:
            if not slot.size_bytes:  # of a model without blocks
                continue
            data = np.ascontiguousarray(blobs[:, slot.offset_bytes : slot.offset_bytes + slot.size_bytes])
            values = data.view(item_type(slot.kind)).reshape(len(which), -1)
            key = (slot.kind, slot.metric, slot.num_rows, slot.num_columns)
            pieces.setdefault(key, []).append((which, values))
    for key, found in pieces.items():
        which = np.concatenate([piece[0] for piece in found])
        order = np.argsort(which)
        yield Column(*key, which[order], np.concatenate([piece[1] for piece in found])[order])


def _chunks(
    stream: Stream, rows: Sequence[Row[*tuple[Any, ...]]], layouts: Mapping[int, Layout]
) -> Iterator[dict[str, Any]]:
    steps = np.array([row.step for row in rows], np.int64)
    parts: dict[tuple[Kind, str], int] = {}
    for kind, metric, num_rows, num_columns, which, values in columns_of(rows, layouts):
        part = parts[kind, metric] = parts.get((kind, metric), -1) + 1
        packed = pack_chunk(kind, steps[which], values)
        shape = {"num_rows": num_rows, "num_columns": num_columns}
        yield {**stream._asdict(), "kind": kind, "metric": metric, "part": part, **shape, **packed._asdict()}


def _mark_settled(connection: Connection, stream: Stream, seqs: Sequence[int]) -> None:
    c = schema.settled.c
    for page, group in groupby(sorted(seqs), key=lambda seq: seq // PAGE_SEQS):
        where = stream.of(schema.settled) & (c.page == page)
        known = connection.execute(select(c.seqs).where(where)).scalar_one_or_none()
        bits = 0 if known is None else int.from_bytes(known, "little")
        for seq in group:
            bits |= 1 << (seq % PAGE_SEQS)
        marked = bits.to_bytes(PAGE_SEQS // 8, "little")
        if known is None:
            connection.execute(insert(schema.settled).values(**stream._asdict(), page=page, seqs=marked))
        else:
            connection.execute(update(schema.settled).where(where).values(seqs=marked))
