"""The frames of a run one after the other, as the rules saw them, in memory that does not grow with the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, select, tuple_

from tsemon.wire import Array, Frame
from tsemon_server.store import schema
from tsemon_server.store.chunks import Frames
from tsemon_server.store.exporting import Export, Piece, Segment
from tsemon_server.store.streams import Stream

_FRAMES_AT_A_TIME = 512


class PastFrame(NamedTuple):
    """A frame as it is stored: what it measured, exactly, as arrays."""

    attempt: int
    writer: str
    seq: int
    step: int
    time: float
    scalars: Mapping[str, float]
    layers: Mapping[str, NDArray[np.float32]]
    """(layers,) each."""
    heads: Mapping[str, NDArray[np.float32]]
    """(blocks, heads) each."""

    def to_wire(self) -> Frame:
        """The frame as its writer sent it."""
        layers, heads = (
            {name: Array(values.shape, values.tobytes()) for name, values in arrays.items()}
            for arrays in (self.layers, self.heads)
        )
        return Frame(self.seq, self.step, self.time, self.scalars, layers, heads)


_Entry = tuple[int, PastFrame | None]
"""A step, and a frame of it."""


class Replay:
    """Attempt by attempt in the order of steps, frames of one step by writer and seq.

    Of each of `attempts` all frames, as it was; without them, the frames that no later attempt hides. Both steps are
    included. Can be gone through once; `num_dropped` and `num_damaged` then tell what could not be among them.
    """

    def __init__(
        self,
        connection: Connection,
        run_id: str,
        attempts: Sequence[int] | None = None,
        from_step: int = 0,
        to_step: int | None = None,
    ) -> None:
        self._connection, self._run_id, self._from = connection, run_id, from_step
        wanted = [None] if attempts is None else attempts
        self._exports = [Export(connection, run_id, None, from_step, to_step, attempt) for attempt in wanted]

    @property
    def num_dropped(self) -> int:
        """Values that retention has reduced to rollups."""
        return sum(export.num_dropped for export in self._exports)

    @property
    def num_damaged(self) -> int:
        """Values that are stored and cannot be read."""
        return sum(export.num_damaged for export in self._exports)

    def __iter__(self) -> Iterator[PastFrame]:
        for export in self._exports:
            for attempt, last_step in export.attempts():
                yield from self._attempt(export, attempt, last_step)

    def _attempt(self, export: Export, attempt: int, last_step: int) -> Iterator[PastFrame]:
        sources = [self._settled(export, segment, last_step) for segment in export.segments(attempt, last_step)]
        merged = merge(*sources, self._hot(export, attempt, last_step), key=itemgetter(0))
        for _, of_step in groupby(merged, key=itemgetter(0)):
            yield from sorted(frame for _, frame in of_step if frame is not None)

    def _settled(self, export: Export, segment: Segment, last_step: int) -> Iterator[_Entry]:
        yield segment.first_step, None  # that is known without reading it: it is read when its turn has come
        frames = export.frames_of(segment)
        stream = Stream(self._run_id, segment.attempt, segment.writer)
        pieces = export.of_segment(segment, frames, export.metric_keys(), last_step)
        for frame in _assembled(stream, frames, pieces):
            if self._from <= frame.step <= last_step:
                yield frame.step, frame

    def _hot(self, export: Export, attempt: int, last_step: int) -> Iterator[_Entry]:
        c = schema.frame.c
        key = (c.step, c.writer, c.seq)
        query = (
            select(c.writer, c.seq, c.step, c.time, c.layout_id, c.blob, c.crcs)
            .where(c.run_id == self._run_id, c.attempt == attempt, c.step >= self._from, c.step <= last_step)
            .order_by(*key)
            .limit(_FRAMES_AT_A_TIME)
        )
        rows = self._connection.execute(query).all()
        while rows:
            found: list[PastFrame] = []
            for writer in {row.writer for row in rows}:
                stream = Stream(self._run_id, attempt, writer)
                mine = [row for row in rows if row.writer == writer]
                seqs, steps = (np.array([row[column] for row in mine], np.int64) for column in (1, 2))
                frames = Frames(seqs, steps, np.array([row.time for row in mine]))
                found += _assembled(stream, frames, export.of_rows(stream, mine, last_step))
            yield from sorted((frame.step, frame) for frame in found)
            last = rows[-1]
            after = (c.step >= last.step, tuple_(*key) > (last.step, last.writer, last.seq))
            rows = self._connection.execute(query.where(*after)).all()


def _assembled(stream: Stream, frames: Frames | None, pieces: Iterable[Piece]) -> list[PastFrame]:
    """The frames in the order they are in, each with its values; none where it is not known which frames there were."""
    seqs, steps, times = ([], [], []) if frames is None else (part.tolist() for part in frames)
    found = {
        seq: PastFrame(stream.attempt, stream.writer, seq, step, time, {}, {}, {})
        for seq, step, time in zip(seqs, steps, times, strict=True)
    }
    for piece in pieces:
        for seq, values in zip(piece.seqs.tolist(), _rows(piece), strict=True):
            getattr(found[seq], piece.kind)[piece.metric] = values
    return list(found.values())


def _rows(piece: Piece) -> Any:
    """The metric frame by frame."""
    if piece.kind == "scalars":
        return piece.values[:, 0].tolist()
    values = np.ascontiguousarray(piece.values)
    return values if piece.kind == "layers" else values.reshape(len(values), -1, piece.num_columns)
