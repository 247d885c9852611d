"""Recounts the rows of a run: each must be whole, and all must agree.

Reads only, and beside a service that writes: what belongs together is read in one transaction, and no transaction is
long, because an engine keeps old pages for as long as one lasts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, select

from tsemon_server.store.engine import Database
from tsemon_server.store.series.checks import Checked, Finding, Report, is_sorted, problem_of_block, problems_of_chunk
from tsemon_server.store.series.chunks import DamagedChunk, unpack_frames
from tsemon_server.store.series.frames import HotFrame
from tsemon_server.store.series.packing import Kind, Layout, layout_id
from tsemon_server.store.series.settling import seqs_of_page
from tsemon_server.store.series.sql import tables
from tsemon_server.store.series.sql.rows import HOT_FRAME, layouts_of
from tsemon_server.store.series.sql.settling import coarse_rollups
from tsemon_server.store.series.sql.spans import is_of
from tsemon_server.store.streams import Stream

_ROWS_AT_A_TIME = 64
_WITHOUT_VALUES = Layout.of(())
_frame, _segment, _chunk = tables.frame.c, tables.segment.c, tables.chunk.c


class RunCheck:
    """Checks one run, and reports its faults."""

    def __init__(self, database: Database, run_id: str, report: Report) -> None:
        self._database, self._run_id, self._report = database, run_id, report

    def run(self) -> Checked:
        with self._database.reading() as connection:
            layouts = self._layouts(connection)
            num_hot = self._hot_frames(connection, layouts)
            segments = self._segments(connection)
            num_settled = sum(segment.num_frames for segment in segments)
            self._tally(connection, num_hot, num_settled)
        num_chunks = Counter[tuple[Any, ...]]()
        for kind, metric in sorted({(slot.kind, slot.metric) for layout in layouts.values() for slot in layout.slots}):
            self._chunks(kind, metric, num_chunks)
        for segment in segments:
            if num_chunks[_key(segment)] != segment.num_chunks:
                told = f"has {num_chunks[_key(segment)]} chunks, expected {segment.num_chunks}"
                self._found(_place(segment), told)
        return Checked(self._run_id, num_hot, num_settled, len(segments), num_chunks.total())

    def _found(self, where: str, what: str) -> None:
        self._report(Finding(self._run_id, where, what))

    def _tally(self, connection: Connection, num_hot: int, num_settled: int) -> None:
        c = tables.tally.c
        num_told = connection.execute(select(c.num_frames).where(c.run_id == self._run_id)).scalar_one_or_none() or 0
        if num_told != num_hot + num_settled:
            self._found("tally", f"counts {num_told} frames, has {num_hot} + {num_settled} settled ones")

    # -- hot frames

    def _layouts(self, connection: Connection) -> Mapping[int, Layout]:
        layouts = layouts_of(connection, self._run_id)
        for number, layout in sorted(layouts.items()):
            if layout_id(layout.slots) != number:
                self._found(f"layout {number}", "is not what its number says")
        return layouts

    def _hot_frames(self, connection: Connection, layouts: Mapping[int, Layout]) -> int:
        num_frames, damaged = 0, dict[tuple[int, str], list[int]]()
        query = (
            select(*HOT_FRAME).where(_frame.run_id == self._run_id).order_by(_frame.attempt, _frame.writer, _frame.seq)
        )
        for frame in map(HotFrame._make, connection.execute(query, execution_options={"yield_per": _ROWS_AT_A_TIME})):
            num_frames += 1
            if not layouts.get(frame.layout_id, _WITHOUT_VALUES).is_sound(frame):
                damaged.setdefault((frame.attempt, frame.writer), []).append(frame.seq)
        for (attempt, writer), seqs in damaged.items():
            self._found(
                f"frames of attempt {attempt}, writer {writer}", f"{len(seqs)} are damaged, the first is seq {seqs[0]}"
            )
        return num_frames

    # -- segments

    def _segments(self, connection: Connection) -> Sequence[Any]:
        segments = connection.execute(
            select(tables.segment)
            .where(_segment.run_id == self._run_id)
            .order_by(_segment.attempt, _segment.writer, _segment.number)
        ).all()
        settled: dict[Stream, list[int]] = {}
        for row in segments:
            seqs = settled.setdefault(Stream(self._run_id, row.attempt, row.writer), [])
            seqs.extend(self._seqs_of(row))
        for stream in {*settled, *self._marked_streams(connection)}:
            self._compare_seqs(connection, stream, settled.get(stream, []))
        return segments

    def _seqs_of(self, row: Any) -> list[int]:
        try:
            frames = unpack_frames(row.frames, row.num_frames)
        except DamagedChunk:
            self._found(_place(row), f"its frames are damaged ({row.num_frames} of them)")
            return []
        if not is_sorted(frames) or (frames.steps[0], frames.steps[-1]) != (row.first_step, row.last_step):
            self._found(_place(row), f"its steps are not from {row.first_step} to {row.last_step} in order")
        return [int(seq) for seq in frames.seqs]

    def _marked_streams(self, connection: Connection) -> list[Stream]:
        c = tables.settled.c
        rows = connection.execute(select(c.run_id, c.attempt, c.writer).where(c.run_id == self._run_id).distinct())
        return [Stream(*row) for row in rows]

    def _compare_seqs(self, connection: Connection, stream: Stream, seqs: list[int]) -> None:
        where = f"attempt {stream.attempt}, writer {stream.writer}"
        settled = {*seqs}
        if len(settled) != len(seqs):
            self._found(where, f"{len(seqs) - len(settled)} frames are in more than one segment")
        c = tables.settled.c
        pages = connection.execute(select(c.page, c.seqs).where(is_of(stream, tables.settled))).all()
        marked = {seq for page, bits in pages for seq in seqs_of_page(page, bits)}
        if marked != settled:
            told = (
                f"{len(marked - settled)} seqs are marked as settled and in no segment, {len(settled - marked)} are not"
            )
            self._found(where, told)
        hot = connection.execute(select(_frame.seq).where(is_of(stream, tables.frame))).scalars()
        if both := settled & {*hot}:
            self._found(where, f"{len(both)} frames are both settled and not, such as seq {min(both)}")

    # -- chunks and blocks

    def _blocks(self, connection: Connection, kind: Kind, metric: str) -> None:
        c = tables.block.c
        of_metric = (c.run_id == self._run_id, c.kind == kind, c.metric == metric)
        for row in connection.execute(select(tables.block).where(*of_metric)).all():
            stream = Stream(self._run_id, row.attempt, row.writer)
            rows = coarse_rollups(connection, stream, row.number, _chunk.kind == kind, _chunk.metric == metric)
            if problem := problem_of_block(row, rows):
                self._found(f"{kind} {metric}, attempt {row.attempt}, writer {row.writer}, block {row.number}", problem)

    def _chunks(self, kind: Kind, metric: str, num_chunks: Counter[tuple[Any, ...]]) -> None:
        chunk, segment = tables.chunk, tables.segment
        is_its_segment = and_(*(chunk.c[column.name] == column for column in segment.primary_key))
        query = (
            select(chunk, _segment.num_frames, _segment.finest, _segment.first_step.label("from_step"))
            .add_columns(_segment.last_step.label("to_step"))
            .outerjoin(segment, is_its_segment)
            .where(_chunk.run_id == self._run_id, _chunk.kind == kind, _chunk.metric == metric)
            .order_by(_chunk.attempt, _chunk.writer, _chunk.number, _chunk.part)
        )
        with self._database.reading() as connection:
            self._blocks(connection, kind, metric)
            for row in connection.execute(query, execution_options={"yield_per": _ROWS_AT_A_TIME}):
                num_chunks[_key(row)] += 1
                for problem in problems_of_chunk(row):
                    self._found(f"{kind} {metric}, {_place(row)}, part {row.part}", problem)


def _key(row: Any) -> tuple[Any, ...]:
    return row.attempt, row.writer, row.number


def _place(row: Any) -> str:
    return f"attempt {row.attempt}, writer {row.writer}, segment {row.number}"
