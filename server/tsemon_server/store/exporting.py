"""Everything that a run recorded, piece by piece, in memory that does not grow with the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, and_, select, tuple_

from tsemon_server.store import schema
from tsemon_server.store.cells import Floats, Ints
from tsemon_server.store.chunks import DamagedChunk, Frames, unpack_frames, unpack_samples
from tsemon_server.store.packing import Kind
from tsemon_server.store.settling import columns_of, layouts_of
from tsemon_server.store.streams import Stream

log = logging.getLogger(__name__)

_FRAMES_AT_A_TIME = 512


class Piece(NamedTuple):
    """One metric over some frames of one writer, in step order. One entry per frame."""

    stream: Stream
    kind: Kind
    metric: str
    num_columns: int
    seqs: Ints
    steps: Ints
    times: NDArray[np.float64]
    values: Floats
    """(frames, rows * columns)"""


class Segment(NamedTuple):
    """Frames of one writer that have settled together."""

    attempt: int
    writer: str
    number: int
    first_step: int


class Export:
    """`pieces` once, then what could not be among them."""

    num_dropped = 0
    """Samples that retention has reduced to rollups."""
    num_damaged = 0
    """Samples that are stored and cannot be read."""

    def __init__(
        self,
        connection: Connection,
        run_id: str,
        metrics: Sequence[str] | None,
        from_step: int | None,
        to_step: int | None,
        attempt: int | None,
    ) -> None:
        self._connection = connection
        self._run_id = run_id
        self._metrics = metrics
        self._from = 0 if from_step is None else from_step
        self._to = schema.NEVER if to_step is None else to_step
        self._attempt = attempt

    def pieces(self) -> Iterator[Piece]:
        """Attempt by attempt: what has settled, segment by segment, then what has not."""
        keys = self.metric_keys()
        for attempt, last_step in self.attempts():
            for segment in self.segments(attempt, last_step):
                yield from self.of_segment(segment, self.frames_of(segment), keys, last_step)
            yield from self._hot(attempt, last_step)

    def attempts(self) -> list[tuple[int, int]]:
        """The attempts, and up to which step each is wanted."""
        c = schema.attempt.c
        rows = self._connection.execute(
            select(c.attempt, c.hidden_from).where(c.run_id == self._run_id).order_by(c.attempt)
        ).all()
        if self._attempt is not None:
            return [(attempt, self._to) for attempt, _ in rows if attempt == self._attempt]
        return [(attempt, min(self._to, hidden_from - 1)) for attempt, hidden_from in rows]

    def metric_keys(self) -> list[tuple[Kind, str]]:
        """What there is to read."""
        c = schema.layout.c
        query = select(c.kind, c.metric).where(c.run_id == self._run_id).distinct().order_by(c.kind, c.metric)
        if self._metrics is not None:
            query = query.where(c.metric.in_(self._metrics))
        return [(kind, metric) for kind, metric in self._connection.execute(query)]

    def segments(self, attempt: int, last_step: int) -> list[Segment]:
        """What has settled of an attempt, writer by writer."""
        c = schema.segment.c
        rows = self._connection.execute(
            select(c.attempt, c.writer, c.number, c.first_step)
            .where(c.run_id == self._run_id, c.attempt == attempt, c.last_step >= self._from, c.first_step <= last_step)
            .order_by(c.writer, c.number)
        )
        return [Segment(*row) for row in rows]

    def frames_of(self, which: Segment) -> Frames | None:
        """The frames of a segment; None where they cannot be read."""
        segment, stream = schema.segment.c, Stream(self._run_id, which.attempt, which.writer)
        packed = self._connection.execute(
            select(segment.frames, segment.num_frames).where(stream.of(schema.segment), segment.number == which.number)
        ).one()
        try:
            return unpack_frames(*packed)
        except DamagedChunk:
            log.error("the frames of run %s, segment %s are damaged", self._run_id, tuple(which))
            return None

    def of_segment(
        self, which: Segment, frames: Frames | None, keys: Sequence[tuple[Kind, str]], last_step: int
    ) -> Iterator[Piece]:
        """What the frames of a segment hold."""
        chunk, stream = schema.chunk.c, Stream(self._run_id, which.attempt, which.writer)
        for kind, metric in keys:  # by whole keys: the number of the segment is at their end
            rows = self._connection.execute(
                select(chunk.num_samples, chunk.num_rows, chunk.num_columns, chunk.samples)
                .where(
                    stream.of(schema.chunk),
                    and_(chunk.kind == kind, chunk.metric == metric, chunk.number == which.number),
                    and_(chunk.last_step >= self._from, chunk.first_step <= last_step),
                )
                .order_by(chunk.part)
            ).all()
            for row in rows:
                yield from self._of_chunk(stream, kind, metric, row, frames, last_step)

    def _of_chunk(
        self, stream: Stream, kind: Kind, metric: str, row: Row[*tuple[Any, ...]], frames: Frames | None, last_step: int
    ) -> Iterator[Piece]:
        if row.samples is None:
            self.num_dropped += row.num_samples
            return
        try:
            if frames is None:
                raise DamagedChunk
            steps, values = unpack_samples(row.samples, kind, row.num_samples, row.num_rows * row.num_columns)
        except DamagedChunk:
            self.num_damaged += row.num_samples
            return
        at = _places(steps, frames.steps)
        piece = Piece(stream, kind, metric, row.num_columns, frames.seqs[at], steps, frames.times[at], values)
        yield from self._wanted(piece, last_step)

    def _hot(self, attempt: int, last_step: int) -> Iterator[Piece]:
        c = schema.frame.c
        query = (
            select(c.writer, c.seq, c.step, c.time, c.layout_id, c.blob, c.crcs)
            .where(c.run_id == self._run_id, c.attempt == attempt)
            .order_by(c.writer, c.seq)
            .limit(_FRAMES_AT_A_TIME)
        )
        rows = self._connection.execute(query).all()
        while rows:
            for writer in sorted({row.writer for row in rows}):
                yield from self.of_rows(Stream(self._run_id, attempt, writer), rows, last_step)
            after = (rows[-1].writer, rows[-1].seq)
            rows = self._connection.execute(query.where(tuple_(c.writer, c.seq) > after)).all()

    def of_rows(self, stream: Stream, rows: Sequence[Row[*tuple[Any, ...]]], last_step: int) -> Iterator[Piece]:
        """What those of the frames hold that are of the stream."""
        rows = sorted((row for row in rows if row.writer == stream.writer), key=lambda row: (row.step, row.seq))
        layouts = layouts_of(self._connection, self._run_id, {row.layout_id for row in rows})
        num_came = len(rows)
        rows = [row for row in rows if layouts[row.layout_id].is_sound(row)]
        self.num_damaged += num_came - len(rows)
        seqs, steps = (np.array([row[column] for row in rows], np.int64) for column in (1, 2))
        times = np.array([row.time for row in rows])
        for kind, metric, _, num_columns, which, values in columns_of(rows, layouts):
            if self._metrics is None or metric in self._metrics:
                piece = Piece(stream, kind, metric, num_columns, seqs[which], steps[which], times[which], values)
                yield from self._wanted(piece, last_step)

    def _wanted(self, piece: Piece, last_step: int) -> Iterator[Piece]:
        """Cut to the steps that were asked for."""
        is_wanted = (piece.steps >= self._from) & (piece.steps <= last_step)
        if is_wanted.any():
            per_frame = {name: getattr(piece, name)[is_wanted] for name in ("seqs", "steps", "times", "values")}
            yield piece._replace(**per_frame)


def _places(steps: Ints, of_frames: Ints) -> NDArray[np.intp]:
    """Where the frames with these steps are; samples of the same step belong to as many frames in a row."""
    first = np.searchsorted(of_frames, steps)
    nth = np.arange(len(steps)) - np.searchsorted(steps, steps)
    return np.minimum(first + nth, len(of_frames) - 1)
