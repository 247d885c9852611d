"""Everything that a run recorded, piece by piece or frame by frame, in memory that does not grow with the run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tsemon_server.store.series.cells import Floats, Ints
from tsemon_server.store.series.chunks import DamagedChunk, Frames, unpack_samples
from tsemon_server.store.series.frames import HotFrame, PastFrame
from tsemon_server.store.series.packing import KINDS, Kind, Layout
from tsemon_server.store.series.segments import SegmentKey, SegmentRows, frames_of
from tsemon_server.store.series.settling import columns_of
from tsemon_server.store.streams import Span, Stream, Visible


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


class Table(Protocol):
    """Samples metric by metric, read once. The counts of missing samples are complete after that."""

    @property
    def num_dropped(self) -> int:
        """Samples that retention has reduced to rollups."""

    @property
    def num_damaged(self) -> int:
        """Samples that are stored and cannot be read."""

    def pieces(self) -> Iterator[Piece]:
        """Yield metric by metric: span by span, in each what has settled, segment by segment, then what has not."""


class Export(Table, Protocol):
    """Whole frames, read once: by `pieces` or by `frames`."""

    def frames(self) -> Iterator[PastFrame]:
        """Yield frame by frame: span by span in the order of steps; of one step, by writer and seq."""


class JoinedTable:
    """A Table of several."""

    def __init__(self, *tables: Table) -> None:
        self._tables = tables

    @property
    def num_dropped(self) -> int:
        return sum(table.num_dropped for table in self._tables)

    @property
    def num_damaged(self) -> int:
        return sum(table.num_damaged for table in self._tables)

    def pieces(self) -> Iterator[Piece]:
        for table in self._tables:
            yield from table.pieces()


class FrameRows(SegmentRows, Protocol):
    """The whole frames of a run, as an engine reads them."""

    def keys(self) -> Sequence[tuple[Kind, str]]:
        """The metrics of the run, by kind and name."""

    def chunks(self, segment: SegmentKey, kind: Kind, metric: str, span: Span) -> Sequence[Any]:
        """num_samples, num_rows, num_columns, samples of the chunks of a segment, part by part."""

    def hot(self, span: Span, *, by_step: bool) -> Iterator[Sequence[HotFrame]]:
        """Hot frames, page by page: by step, writer and seq, or by writer and seq."""

    def layouts(self, layout_ids: Collection[int]) -> Mapping[int, Layout]:
        """Layouts by id."""


_Entry = tuple[int, PastFrame | None]
"""A step, and a frame of it."""


class PackedExport:
    """An Export of packed frames."""

    def __init__(
        self,
        rows: FrameRows,
        run_id: str,
        visible: Visible,
        metrics: Collection[str] | None = None,
        kinds: Collection[Kind] = KINDS,
    ) -> None:
        self._rows, self._run_id, self._visible = rows, run_id, visible
        self._metrics, self._kinds = metrics, kinds
        self.num_dropped = self.num_damaged = 0

    def pieces(self) -> Iterator[Piece]:
        keys = self._keys()
        for span in self._visible:
            for segment in sorted(self._rows.segments([span]), key=lambda segment: (segment.writer, segment.number)):
                yield from self._of_segment(segment, frames_of(self._rows, self._run_id, segment), keys, span)
            for page in self._rows.hot(span, by_step=False):
                for writer in sorted({frame.writer for frame in page}):
                    yield from self._of_hot(writer, page, span)

    def frames(self) -> Iterator[PastFrame]:
        keys = self._keys()
        for span in self._visible:
            sources = [self._settled(segment, keys, span) for segment in self._rows.segments([span])]
            merged = merge(*sources, self._hot(span), key=itemgetter(0))
            for _, of_step in groupby(merged, key=itemgetter(0)):
                yield from sorted(frame for _, frame in of_step if frame is not None)

    def _keys(self) -> list[tuple[Kind, str]]:
        return [key for key in self._rows.keys() if self._is_wanted(*key)]  # noqa: SIM118

    def _is_wanted(self, kind: Kind, metric: str) -> bool:
        return kind in self._kinds and (self._metrics is None or metric in self._metrics)

    # -- settled frames

    def _settled(self, segment: SegmentKey, keys: Sequence[tuple[Kind, str]], span: Span) -> Iterator[_Entry]:
        yield segment.first_step, None  # that is known without reading it: it is read when its turn has come
        frames = frames_of(self._rows, self._run_id, segment)
        pieces = self._of_segment(segment, frames, keys, span)
        for frame in _assembled(segment.attempt, segment.writer, frames, pieces):
            if span.first_step <= frame.step <= span.last_step:
                yield frame.step, frame

    def _of_segment(
        self, segment: SegmentKey, frames: Frames | None, keys: Sequence[tuple[Kind, str]], span: Span
    ) -> Iterator[Piece]:
        """What the frames of a segment hold."""
        stream = Stream(self._run_id, segment.attempt, segment.writer)
        for kind, metric in keys:  # by whole keys: the number of the segment is at their end
            for row in self._rows.chunks(segment, kind, metric, span):
                if row.samples is None:
                    self.num_dropped += row.num_samples
                    continue
                try:
                    if frames is None:
                        raise DamagedChunk
                    num_entries = row.num_rows * row.num_columns
                    steps, values = unpack_samples(row.samples, kind, row.num_samples, num_entries)
                except DamagedChunk:
                    self.num_damaged += row.num_samples
                    continue
                at = _places(steps, frames.steps)
                piece = Piece(stream, kind, metric, row.num_columns, frames.seqs[at], steps, frames.times[at], values)
                yield from _cut(piece, span)

    # -- hot frames

    def _hot(self, span: Span) -> Iterator[_Entry]:
        for page in self._rows.hot(span, by_step=True):
            found: list[PastFrame] = []
            for writer in {frame.writer for frame in page}:
                mine = [frame for frame in page if frame.writer == writer]
                seqs, steps = (np.array([frame[column] for frame in mine], np.int64) for column in (2, 3))
                frames = Frames(seqs, steps, np.array([frame.time for frame in mine]))
                found += _assembled(span.attempt, writer, frames, self._of_hot(writer, mine, span))
            yield from sorted((frame.step, frame) for frame in found)

    def _of_hot(self, writer: str, page: Sequence[HotFrame], span: Span) -> Iterator[Piece]:
        """What those of the frames hold that are of the writer."""
        mine = sorted((frame for frame in page if frame.writer == writer), key=lambda frame: (frame.step, frame.seq))
        layouts = self._rows.layouts({frame.layout_id for frame in mine})
        sound = [frame for frame in mine if layouts[frame.layout_id].is_sound(frame)]
        self.num_damaged += len(mine) - len(sound)
        seqs, steps = (np.array([frame[column] for frame in sound], np.int64) for column in (2, 3))
        times = np.array([frame.time for frame in sound])
        stream = Stream(self._run_id, span.attempt, writer)
        for kind, metric, _, num_columns, which, values in columns_of(sound, layouts):
            if self._is_wanted(kind, metric):
                yield Piece(stream, kind, metric, num_columns, seqs[which], steps[which], times[which], values)


def _cut(piece: Piece, span: Span) -> Iterator[Piece]:
    """To the steps of the span."""
    is_wanted = (piece.steps >= span.first_step) & (piece.steps <= span.last_step)
    if is_wanted.any():
        per_frame = {name: getattr(piece, name)[is_wanted] for name in ("seqs", "steps", "times", "values")}
        yield piece._replace(**per_frame)


def _places(steps: Ints, of_frames: Ints) -> NDArray[np.intp]:
    """Where the frames with these steps are; samples of the same step belong to as many frames in a row."""
    first = np.searchsorted(of_frames, steps)
    nth = np.arange(len(steps)) - np.searchsorted(steps, steps)
    return np.minimum(first + nth, len(of_frames) - 1)


def _assembled(attempt: int, writer: str, frames: Frames | None, pieces: Iterable[Piece]) -> list[PastFrame]:
    """The frames in the order they are in, each with its values; none where it is not known which frames there were."""
    seqs, steps, times = ([], [], []) if frames is None else (part.tolist() for part in frames)
    found = {
        seq: PastFrame(attempt, writer, seq, step, time, {}, {}, {})
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
