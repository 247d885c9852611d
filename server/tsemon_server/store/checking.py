"""Recounts a database: whether everything in it is whole, and one part of it goes with the others.

Reads only, and beside a service that writes: what belongs together is read in one transaction, and no transaction is
long, because an engine keeps old pages for as long as one lasts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, Row, and_, literal, select, union_all

from tsemon.errors import StoreError
from tsemon_server.store import schema
from tsemon_server.store.blocks import coarse_rollups, summed_up
from tsemon_server.store.cells import Cells, Floats, Ints, merged, of_samples, starts_of
from tsemon_server.store.chunks import (
    DamagedChunk,
    Frames,
    crc_of,
    unpack_coarse,
    unpack_fine,
    unpack_frames,
    unpack_samples,
)
from tsemon_server.store.engine import Database
from tsemon_server.store.packing import Kind, Layout, layout_id
from tsemon_server.store.settling import layouts_of, seqs_of_page
from tsemon_server.store.streams import Stream

_ROWS_AT_A_TIME = 64
_TOLERANCE = 1e-5
"""Of rollups kept in float32, whose rounding is 6e-8 of a value, and whose sums may be added in another order."""


class Finding(NamedTuple):
    """Something that is not as it must be."""

    run_id: str
    where: str
    what: str


class Checked(NamedTuple):
    """What was looked at in one run."""

    run_id: str
    num_hot: int
    num_settled: int
    num_segments: int
    num_chunks: int


Report = Callable[[Finding], None]


def check(database: Database, report: Report) -> Iterator[Checked]:
    """Go through all runs, one after the other."""
    for problem in database.problems():
        report(Finding("", "database", problem))
    with database.reading() as connection:
        for table, run_id in _orphans(connection):
            report(Finding(run_id, table, "rows of a run that is not there, nor marked as deleted"))
        run_ids = connection.execute(select(schema.run.c.run_id).order_by(schema.run.c.run_id)).scalars().all()
    for run_id in run_ids:
        findings: list[Finding] = []
        try:
            checked = _RunCheck(database, run_id, findings.append).run()
        except StoreError as error:  # such as a page that SQLite cannot read
            report(Finding(run_id, "run", str(error)))
            continue
        if checked is not None:  # else deleted meanwhile, and half of it was gone when it was looked at
            for finding in findings:
                report(finding)
            yield checked


class _RunCheck:
    def __init__(self, database: Database, run_id: str, report: Report) -> None:
        self._database, self._run_id, self._report = database, run_id, report

    def run(self) -> Checked | None:
        with self._database.reading() as connection:
            run = connection.execute(select(schema.run).where(schema.run.c.run_id == self._run_id)).one_or_none()
            if run is None:
                return None
            layouts = self._layouts(connection)
            num_hot = self._hot_frames(connection, layouts)
            segments = self._segments(connection)
            num_settled = sum(segment.num_frames for segment in segments)
            if num_hot + num_settled != run.num_frames:
                self._found("run", f"counts {run.num_frames} frames, has {num_hot} + {num_settled} settled ones")
        num_chunks = Counter[tuple[Any, ...]]()
        for kind, metric in sorted({(slot.kind, slot.metric) for layout in layouts.values() for slot in layout.slots}):
            self._chunks(kind, metric, num_chunks)
        if not self._is_there():
            return None
        for segment in segments:
            if num_chunks[_key(segment)] != segment.num_chunks:
                told = f"has {num_chunks[_key(segment)]} chunks, expected {segment.num_chunks}"
                self._found(_place(segment), told)
        return Checked(self._run_id, num_hot, num_settled, len(segments), num_chunks.total())

    def _found(self, where: str, what: str) -> None:
        self._report(Finding(self._run_id, where, what))

    def _is_there(self) -> bool:
        with self._database.reading() as connection:
            is_run = schema.run.c.run_id == self._run_id
            return connection.execute(select(schema.run.c.run_id).where(is_run)).first() is not None

    # -- hot frames

    def _layouts(self, connection: Connection) -> Mapping[int, Layout]:
        c = schema.layout.c
        numbers = connection.execute(select(c.layout_id).where(c.run_id == self._run_id).distinct()).scalars()
        layouts = layouts_of(connection, self._run_id, {*numbers})
        for number, layout in sorted(layouts.items()):
            if layout_id(layout.slots) != number:
                self._found(f"layout {number}", "is not what its number says")
        return layouts

    def _hot_frames(self, connection: Connection, layouts: Mapping[int, Layout]) -> int:
        frame, num_frames = schema.frame, 0
        damaged: dict[tuple[int, str], list[int]] = {}
        rows = connection.execute(
            select(frame)
            .where(frame.c.run_id == self._run_id)
            .order_by(frame.c.attempt, frame.c.writer, frame.c.seq)
            .execution_options(yield_per=_ROWS_AT_A_TIME)
        )
        for row in rows:
            num_frames += 1
            if row.layout_id not in layouts or not layouts[row.layout_id].is_sound(row):
                damaged.setdefault((row.attempt, row.writer), []).append(row.seq)
        for (attempt, writer), seqs in damaged.items():
            self._found(
                f"frames of attempt {attempt}, writer {writer}", f"{len(seqs)} are damaged, the first is seq {seqs[0]}"
            )
        return num_frames

    # -- segments

    def _segments(self, connection: Connection) -> list[Row[Any]]:
        segment = schema.segment.c
        segments = connection.execute(
            select(schema.segment)
            .where(segment.run_id == self._run_id)
            .order_by(segment.attempt, segment.writer, segment.number)
        ).all()
        settled: dict[Stream, list[int]] = {}
        for row in segments:
            seqs = settled.setdefault(Stream(self._run_id, row.attempt, row.writer), [])
            seqs.extend(self._seqs_of(row))
        for stream in {*settled, *self._marked_streams(connection)}:
            self._compare_seqs(connection, stream, settled.get(stream, []))
        return list(segments)

    def _seqs_of(self, row: Row[Any]) -> list[int]:
        try:
            frames = unpack_frames(row.frames, row.num_frames)
        except DamagedChunk:
            self._found(_place(row), f"its frames are damaged ({row.num_frames} of them)")
            return []
        if not _is_sorted(frames) or (frames.steps[0], frames.steps[-1]) != (row.first_step, row.last_step):
            self._found(_place(row), f"its steps are not from {row.first_step} to {row.last_step} in order")
        return [int(seq) for seq in frames.seqs]

    def _marked_streams(self, connection: Connection) -> list[Stream]:
        c = schema.settled.c
        rows = connection.execute(select(c.run_id, c.attempt, c.writer).where(c.run_id == self._run_id).distinct())
        return [Stream(*row) for row in rows]

    def _compare_seqs(self, connection: Connection, stream: Stream, seqs: list[int]) -> None:
        where = f"attempt {stream.attempt}, writer {stream.writer}"
        settled = {*seqs}
        if len(settled) != len(seqs):
            self._found(where, f"{len(seqs) - len(settled)} frames are in more than one segment")
        pages = connection.execute(
            select(schema.settled.c.page, schema.settled.c.seqs).where(stream.of(schema.settled))
        ).all()
        marked = {seq for page, bits in pages for seq in seqs_of_page(page, bits)}
        if marked != settled:
            told = (
                f"{len(marked - settled)} seqs are marked as settled and in no segment, {len(settled - marked)} are not"
            )
            self._found(where, told)
        hot = connection.execute(select(schema.frame.c.seq).where(stream.of(schema.frame))).scalars()
        if both := settled & {*hot}:
            self._found(where, f"{len(both)} frames are both settled and not, such as seq {min(both)}")

    # -- chunks and blocks

    def _blocks(self, connection: Connection, kind: Kind, metric: str) -> None:
        block, chunk = schema.block, schema.chunk.c
        of_metric = (block.c.run_id == self._run_id, block.c.kind == kind, block.c.metric == metric)
        for row in connection.execute(select(block).where(*of_metric)).all():
            stream = Stream(self._run_id, row.attempt, row.writer)
            rows = coarse_rollups(connection, stream, row.number, chunk.kind == kind, chunk.metric == metric)
            if problem := _problem_of_block(row, rows):
                self._found(f"{kind} {metric}, attempt {row.attempt}, writer {row.writer}, block {row.number}", problem)

    def _chunks(self, kind: Kind, metric: str, num_chunks: Counter[tuple[Any, ...]]) -> None:
        chunk, segment = schema.chunk, schema.segment
        is_its_segment = and_(*(chunk.c[column.name] == column for column in segment.primary_key))
        query = (
            select(chunk, segment.c.num_frames, segment.c.finest, segment.c.first_step.label("from_step"))
            .add_columns(segment.c.last_step.label("to_step"))
            .outerjoin(segment, is_its_segment)
            .where(chunk.c.run_id == self._run_id, chunk.c.kind == kind, chunk.c.metric == metric)
            .order_by(chunk.c.attempt, chunk.c.writer, chunk.c.number, chunk.c.part)
        )
        with self._database.reading() as connection:
            self._blocks(connection, kind, metric)
            for row in connection.execute(query, execution_options={"yield_per": _ROWS_AT_A_TIME}):
                num_chunks[_key(row)] += 1
                for problem in _problems_of(row):
                    self._found(f"{kind} {metric}, {_place(row)}, part {row.part}", problem)


def _problem_of_block(row: Row[Any], rows: list[Row[Any]]) -> str | None:
    if crc_of(row.cells, row.stats) != row.crc:
        return "is damaged"
    expected = next(summed_up(rows), None) if rows else {}
    if expected is None:
        return None  # a chunk of it is damaged, and reported
    if all(row._mapping[name] == value for name, value in expected.items() if name not in ("stats", "crc")):
        found, again = (
            unpack_coarse(row.cells, stats, row.kind, row.num_rows * row.num_columns)
            for stats in (row.stats, expected.get("stats", b""))
        )
        if expected and _is_close(found, again):
            return None
    return "does not go with its chunks"


def _problems_of(row: Row[Any]) -> Iterator[str]:
    if row.num_frames is None:
        yield "its segment is missing"
    elif row.num_samples > row.num_frames or row.first_step < row.from_step or row.last_step > row.to_step:
        yield f"{row.num_samples} samples from step {row.first_step} to {row.last_step} do not fit into its segment"
    elif (row.samples is not None, row.fine is not None) != (row.finest == "samples", row.finest != "coarse"):
        yield f"its segment says that it has its {row.finest}, which is not so"
    levels: dict[str, Cells] = {}
    for level, read in (("samples", _samples), ("fine", _fine), ("coarse", _coarse)):
        if getattr(row, level) is None:
            continue
        try:
            levels[level] = cells = read(row)
        except DamagedChunk:
            yield f"its {level} are damaged" if level == "samples" else f"its {level} rollup is damaged"
            continue
        if _extent(cells) != (row.first_step, row.last_step, row.num_samples):
            yield f"its {level} tell first step, last step and samples as {_extent(cells)}, its row does not"
    yield from _disagreements(row, levels)


def _disagreements(row: Row[Any], levels: dict[str, Cells]) -> Iterator[str]:
    """Each rollup against the finest level that can be read."""
    if not levels:
        return
    finest, cells = next(iter(levels.items()))
    for level, shift in (("fine", row.fine_shift), ("coarse", row.coarse_shift)):
        if level in levels and level != finest:
            expected = merged(cells, starts_of(cells.spans[:, 0] >> shift))
            if not _is_close(levels[level], expected):
                yield f"its {level} rollup does not go with its {finest}"


def _samples(row: Row[Any]) -> Cells:
    found: tuple[Ints, Floats] = unpack_samples(row.samples, row.kind, row.num_samples, row.num_rows * row.num_columns)
    return of_samples(*found)


def _fine(row: Row[Any]) -> Cells:
    return unpack_fine(row.fine, row.kind, row.num_samples, row.num_rows * row.num_columns)


def _coarse(row: Row[Any]) -> Cells:
    if crc_of(row.coarse_cells, row.coarse) != row.coarse_crc:
        raise DamagedChunk
    return unpack_coarse(row.coarse_cells, row.coarse, row.kind, row.num_rows * row.num_columns)


def _extent(cells: Cells) -> tuple[int, int, int]:
    spans = cells.spans
    return (int(spans[0, 0]), int(spans[-1, 1]), int(spans[:, 2].sum())) if len(spans) else (0, 0, 0)


def _is_close(found: Cells, expected: Cells) -> bool:
    if not np.array_equal(found.spans, expected.spans) or found.stats.shape != expected.stats.shape:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return np.allclose(found.stats, expected.stats, _TOLERANCE, _TOLERANCE, equal_nan=True)


def _is_sorted(frames: Frames) -> bool:
    return bool((np.diff(frames.steps) >= 0).all())


def _key(row: Row[Any]) -> tuple[Any, ...]:
    return row.attempt, row.writer, row.number


def _place(row: Row[Any]) -> str:
    return f"attempt {row.attempt}, writer {row.writer}, segment {row.number}"


def _orphans(connection: Connection) -> list[tuple[str, str]]:
    """Tables and ids."""
    known = union_all(select(schema.run.c.run_id), select(schema.tombstone.c.run_id))
    tables = (table for table in schema.metadata.sorted_tables if "run_id" in table.c)
    rows = union_all(
        *(
            select(literal(table.name), table.c.run_id).where(table.c.run_id.not_in(known)).distinct()
            for table in tables
            if table not in (schema.run, schema.tombstone)
        )
    )
    return [(table, run_id) for table, run_id in connection.execute(rows)]
