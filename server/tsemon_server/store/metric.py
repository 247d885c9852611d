"""One metric of a run, read from frames and chunks alike."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, Connection, Row, Select, Table, and_, case, exists, func, literal, select

from tsemon_server.store import schema
from tsemon_server.store.blocks import BITS_OF_CHUNK
from tsemon_server.store.cells import Cells, Floats, Ints, joined, of_samples, smallest_shift
from tsemon_server.store.chunks import DamagedChunk, crc_of, unpack_coarse, unpack_fine, unpack_samples
from tsemon_server.store.packing import Kind, item_bytes, item_type

log = logging.getLogger(__name__)


class Samples(NamedTuple):
    """One metric over the frames of a run, in step order."""

    steps: Ints
    """int64, (n,)"""
    values: Floats
    """(n, entries)"""
    num_damaged: int = 0
    """Samples that are stored and cannot be read."""


class Points(NamedTuple):
    """One metric over the frames of a run as cells, no finer than was asked for."""

    cells: Cells
    shift: int
    """Steps that are the same but for their last `shift` bits belong together."""
    num_damaged: int = 0


Extent = tuple[int, int, int]
"""First step, last step, number of samples."""


class MetricReader:
    """Reads within steps `from_step` to `to_step`, both included.

    `entry` is a row (layer) and a column (head); without it all are read. Without `attempt` the frames are those that no
    later attempt hides.
    """

    def __init__(
        self,
        connection: Connection,
        run_id: str,
        kind: Kind,
        metric: str,
        *,
        entry: tuple[int, int] | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        attempt: int | None = None,
    ) -> None:
        self._connection = connection
        self._run_id, self._kind, self._metric = run_id, kind, metric
        self._entry = entry
        self._from = 0 if from_step is None else from_step
        self._to = schema.NEVER if to_step is None else to_step
        self._attempt = attempt

    def samples(self) -> Samples:
        """All of them, those of one step in no order. What retention has reduced to rollups is not among them."""
        parts = [self._hot()]
        num_damaged = parts[0].num_damaged
        overlaps = and_(schema.chunk.c.last_step >= self._from, schema.chunk.c.first_step <= self._to)
        for row in self._connection.execute(self._chunks(overlaps, schema.chunk.c.samples)):
            try:
                parts += [self._unpacked_samples(row)] if row.samples is not None else []
            except DamagedChunk:
                num_damaged += self._report(row, "samples")
        steps = np.concatenate([part.steps for part in parts])
        order = np.argsort(steps, kind="stable")
        return Samples(steps[order], _stacked([part.values for part in parts])[order], num_damaged)

    def extent(self) -> Extent | None:
        """Of what is stored, None where that is nothing."""
        parts = [_cells(self._hot())]
        return _joint(self._plan(parts)[0] + _extents(parts))

    def points(self, most: int, *, ends_alone: bool, shift: int | None = None) -> Points:
        """Cells that fit into at most `most` buckets on a grid of steps; each sample by itself where that are no more.

        With `ends_alone` the first and the last step are buckets of their own. With `shift` the grid is that one.
        """
        hot = self._hot()
        parts = [_cells(hot)]
        extents, num_damaged = self._plan(parts)
        num_damaged += hot.num_damaged
        extent = _joint(extents + _extents(parts))
        if extent is None:
            return Points(parts[0], shift or 0, num_damaged)
        first, last, _ = extent
        if shift is None:
            shift = shift_of(extent, most, ends_alone=ends_alone)
        between = (first + ends_alone, last - ends_alone)
        in_blocks = and_(self._is_inside(schema.block, *between), schema.block.c.shift <= shift)
        inside = self._is_inside(schema.chunk, self._from, self._to)
        for where in (*self._add_blocks(parts, in_blocks), and_(inside, ~self._is_in_block(in_blocks))):
            num_damaged += self._add_inside(parts, shift, where, self._is_inside(schema.chunk, *between))
        return Points(joined(parts), shift, num_damaged)

    def _plan(self, parts: list[Cells]) -> tuple[list[Extent], int]:
        """The extents of what is wholly inside, still to be read at the level that they ask for.

        Chunks that reach over an edge are added to `parts` at once. How many samples of those cannot be read comes second.
        """
        chunk, block = schema.chunk.c, schema.block.c
        inside = self._is_inside(schema.chunk, self._from, self._to)
        block_is_inside = self._is_inside(schema.block, self._from, self._to)
        of_blocks = select(func.min(block.first_step), func.max(block.last_step), func.sum(block.num_samples))
        first, last, num_samples = self._connection.execute(self._only(of_blocks, schema.block, block_is_inside)).one()
        extents = [(first, last, int(num_samples))] if num_samples else []
        overlaps = and_(chunk.last_step >= self._from, chunk.first_step <= self._to)
        columns = (chunk.first_step, chunk.last_step, inside.label("is_inside"))
        num_damaged = 0
        is_alone = and_(overlaps, ~self._is_in_block(block_is_inside))
        for row in self._connection.execute(self._chunks(is_alone, *columns)).all():
            if row.is_inside:
                extents.append((row.first_step, row.last_step, row.num_samples))
            else:
                num_damaged += self._add_finest(row, parts)
        return extents, num_damaged

    # -- hot frames

    def _hot(self) -> Samples:
        frame, layout = schema.frame, schema.layout
        row, column = self._entry or (0, 0)
        width = item_bytes(self._kind)
        position = row * layout.c.num_columns + column
        num_entries = literal(1) if self._entry else layout.c.num_rows * layout.c.num_columns
        found = func.substr(frame.c.blob, layout.c.offset_bytes + 1 + position * width, num_entries * width)
        query = (
            select(frame.c.step, found, num_entries * width)
            .join(layout, slot_of(layout.c, frame.c, self._kind, self._metric))
            .where(
                frame.c.run_id == self._run_id,
                frame.c.step >= self._from,
                frame.c.step <= self._to,
                layout.c.num_rows > row,
                layout.c.num_columns > column,
            )
            .order_by(frame.c.step)
        )
        all_rows = self._connection.execute(self._visible(query, schema.frame.c.attempt, schema.frame.c.step)).all()
        rows = [row for row in all_rows if len(row[1]) == row[2]]
        if num_damaged := len(all_rows) - len(rows):
            log.error("%d frames of run %s are damaged; `tsemon admin check` lists all such", num_damaged, self._run_id)
        steps = np.fromiter((row[0] for row in rows), np.int64, len(rows))
        blobs: list[Floats] = [np.frombuffer(row[1], item_type(self._kind)) for row in rows]
        if len({len(blob) for blob in blobs}) > 1:
            return Samples(steps, _stacked([blob[None] for blob in blobs]), num_damaged)
        values = np.concatenate(blobs) if blobs else np.empty(0, item_type(self._kind))
        return Samples(steps, values.reshape(len(rows), len(values) // len(rows) if rows else 1), num_damaged)

    def _visible(self, query: Select[Any], attempt: Any, first_step: Any) -> Select[Any]:
        """Only of this attempt, or of all attempts as far as no later one hides them."""
        if self._attempt is not None:
            return query.where(attempt == self._attempt)
        return query.join(
            schema.attempt,
            and_(
                schema.attempt.c.run_id == self._run_id,
                schema.attempt.c.attempt == attempt,
                schema.attempt.c.hidden_from > first_step,
            ),
        )

    # -- chunks and blocks

    def _only(self, query: Select[Any], table: Table, where: ColumnElement[bool]) -> Select[Any]:
        """The chunks or blocks of the metric, as far as they are visible."""
        c = table.c
        row, column = self._entry or (0, 0)
        query = query.select_from(table).where(
            c.run_id == self._run_id,
            c.kind == self._kind,
            c.metric == self._metric,
            c.num_rows > row,
            c.num_columns > column,
            where,
        )
        return self._visible(query, c.attempt, c.first_step)

    def _chunks(self, where: ColumnElement[bool], *columns: Any) -> Select[Any]:
        """What they are, and `columns`."""
        chunk = schema.chunk.c
        hidden_from = literal(schema.NEVER) if self._attempt is not None else schema.attempt.c.hidden_from
        about = (chunk.attempt, chunk.writer, chunk.number, chunk.part, chunk.num_samples, chunk.num_rows)
        query = select(*about, chunk.num_columns, hidden_from.label("hidden_from"), *columns)
        return self._only(query, schema.chunk, where)

    def _is_inside(self, table: Table, first: int, last: int) -> ColumnElement[bool]:
        """Whether all of a chunk or a block is visible and within these steps."""
        inside = and_(table.c.first_step >= first, table.c.last_step <= last)
        return inside if self._attempt is not None else and_(inside, table.c.last_step < schema.attempt.c.hidden_from)

    def _is_in_block(self, where: ColumnElement[bool]) -> ColumnElement[bool]:
        """Whether a chunk is part of a block for which `where` holds."""
        chunk, block = schema.chunk.c, schema.block.c
        return exists().where(
            block.run_id == self._run_id,
            block.kind == self._kind,
            block.metric == self._metric,
            block.attempt == chunk.attempt,
            block.writer == chunk.writer,
            block.number == chunk.number.bitwise_rshift(BITS_OF_CHUNK),
            where,
        )

    def _add_blocks(self, parts: list[Cells], where: ColumnElement[bool]) -> list[ColumnElement[bool]]:
        """Add the cells of blocks; which chunks to read in place of those that are damaged."""
        block, chunk = schema.block.c, schema.chunk.c
        columns = (block.attempt, block.writer, block.number, block.num_rows, block.num_columns)
        query = select(block.cells, block.stats, block.crc, *columns)
        found, in_place = _Coarse(self._kind), []
        for cells, stats, crc, attempt, writer, number, *shape in self._connection.execute(
            self._only(query, schema.block, where)
        ):
            if crc_of(cells, stats) == crc:
                found.add(cells, stats, *shape)
                continue
            log.error("block %d of %s in run %s is damaged; its chunks are read", number, self._metric, self._run_id)
            is_of_block = chunk.number.bitwise_rshift(BITS_OF_CHUNK) == number
            in_place.append(and_(chunk.attempt == attempt, chunk.writer == writer, is_of_block))
        parts += [Cells(spans, self._of_entry(stats, columns)) for spans, stats, columns in found.cells()]
        return in_place

    def _add_inside(
        self, parts: list[Cells], shift: int, where: ColumnElement[bool], may_roll: ColumnElement[bool]
    ) -> int:
        """Add the cells of chunks that are wholly inside; how many samples cannot be read."""
        chunk = schema.chunk.c
        level = case(
            (and_(may_roll, chunk.coarse_shift <= shift), "coarse"),
            (and_(may_roll, chunk.fine_shift <= shift, chunk.fine.is_not(None)), "fine"),
            (chunk.samples.is_not(None), "samples"),
            (chunk.fine.is_not(None), "fine"),
            else_="coarse",
        )
        blob = case((level == "coarse", chunk.coarse), (level == "fine", chunk.fine), else_=chunk.samples)
        columns = (level.label("level"), blob.label("blob"), chunk.coarse_cells, chunk.coarse_crc)
        coarse, num_damaged = _Coarse(self._kind), 0
        for row in self._connection.execute(self._chunks(where, *columns)).all():
            try:
                if row.level == "coarse":
                    _check_coarse(row.coarse_cells, row.blob, row.coarse_crc)
                    coarse.add(row.coarse_cells, row.blob, row.num_rows, row.num_columns)
                else:
                    parts.append(self._cells_of(row, row.level, row.blob))
            except DamagedChunk:
                self._report(row, row.level)
                num_damaged += self._add_finest(row, parts, unsound=row.level)
        parts += [Cells(spans, self._of_entry(stats, columns)) for spans, stats, columns in coarse.cells()]
        return num_damaged

    def _add_finest(self, row: Row[Any], parts: list[Cells], unsound: str = "") -> int:
        """Add the cells of the finest level that is there and sound, cut to what was asked for.

        Returns how many samples are left out: all where no level is sound, else those of cells that reach beyond.
        """
        chunk = schema.chunk.c
        stored = self._connection.execute(
            self._only(
                select(chunk.samples, chunk.fine, chunk.coarse, chunk.coarse_cells, chunk.coarse_crc),
                schema.chunk,
                and_(
                    chunk.attempt == row.attempt,
                    chunk.writer == row.writer,
                    chunk.number == row.number,
                    chunk.part == row.part,
                ),
            )
        ).one()
        last_step, is_damaged = min(self._to, row.hidden_from - 1), bool(unsound)
        for level in ("samples", "fine", "coarse"):
            blob = getattr(stored, level)
            if blob is None or level == unsound:
                continue
            try:
                if level == "coarse":
                    _check_coarse(stored.coarse_cells, blob, stored.coarse_crc)
                cells = self._cells_of(row, level, blob, stored.coarse_cells)
            except DamagedChunk:
                self._report(row, level)
                is_damaged = True
                continue
            first, last, num_samples = cells.spans.T
            is_wanted = (first >= self._from) & (last <= last_step)
            is_cut = (first <= last_step) & (last >= self._from) & ~is_wanted
            parts.append(Cells(cells.spans[is_wanted], cells.stats[is_wanted]))
            return int(num_samples[is_cut].sum()) if is_damaged else 0
        return int(row.num_samples)

    def _cells_of(self, row: Row[Any], level: str, blob: bytes, coarse_cells: bytes = b"") -> Cells:
        num_entries = row.num_rows * row.num_columns
        if level == "samples":
            steps, values = unpack_samples(blob, self._kind, row.num_samples, num_entries)
            return of_samples(steps, self._of_entry(values, row.num_columns))
        if level == "fine":
            cells = unpack_fine(blob, self._kind, row.num_samples, num_entries)
        else:
            cells = unpack_coarse(coarse_cells, blob, self._kind, num_entries)
        return Cells(cells.spans, self._of_entry(cells.stats, row.num_columns))

    def _unpacked_samples(self, row: Row[Any]) -> Samples:
        steps, values = unpack_samples(row.samples, self._kind, row.num_samples, row.num_rows * row.num_columns)
        is_wanted = (steps >= self._from) & (steps <= min(self._to, row.hidden_from - 1))
        return Samples(steps[is_wanted], self._of_entry(values, row.num_columns)[is_wanted])

    def _of_entry(self, values: Floats, num_columns: int) -> Floats:
        """Of all entries, which are the second axis, the one that was asked for."""
        if self._entry is None:
            return values
        index = self._entry[0] * num_columns + self._entry[1]
        return values[:, index : index + 1]

    def _report(self, row: Row[Any], what: str) -> int:
        log.error(
            "the %s of %s %s in run %s, attempt %d, writer %s, chunk %d are damaged; `tsemon admin check` lists all such",
            what, self._kind, self._metric, self._run_id, row.attempt, row.writer, row.number,
        )  # fmt: skip
        return int(row.num_samples)


def shift_of(extent: Extent, most: int, *, ends_alone: bool) -> int:
    """The finest grid on which so much fits into at most `most` buckets."""
    first, last, num_samples = extent
    return 0 if num_samples <= most else smallest_shift(first, last, most - 2 * ends_alone)


def _extents(parts: list[Cells]) -> list[Extent]:
    return [(int(s[:, 0].min()), int(s[:, 1].max()), int(s[:, 2].sum())) for s, _ in parts if len(s)]


def _joint(extents: list[Extent]) -> Extent | None:
    if not extents:
        return None
    firsts, lasts, nums_samples = zip(*extents, strict=True)
    return min(firsts), max(lasts), sum(nums_samples)


def slot_of(layout: Any, frame: Any, kind: Kind, metric: str) -> ColumnElement[bool]:
    """Joins a frame with where the metric lies in it."""
    return and_(
        layout.run_id == frame.run_id,
        layout.layout_id == frame.layout_id,
        layout.kind == kind,
        layout.metric == metric,
    )


class _Coarse:
    """Coarse rollups of many rows, unpacked all at once: a chart over a long run has hundreds."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._by_shape: dict[tuple[int, int], tuple[list[bytes], list[bytes]]] = {}

    def add(self, cells: bytes, stats: bytes, num_rows: int, num_columns: int) -> None:
        of_shape = self._by_shape.setdefault((num_rows, num_columns), ([], []))
        of_shape[0].append(cells)
        of_shape[1].append(stats)

    def cells(self) -> Iterator[tuple[Ints, Floats, int]]:
        """Spans, values and the number of columns, one triple per shape."""
        for (num_rows, num_columns), (cells, stats) in self._by_shape.items():
            found = unpack_coarse(b"".join(cells), b"".join(stats), self._kind, num_rows * num_columns)
            yield found.spans, found.stats, num_columns


def _check_coarse(cells: bytes, stats: bytes, crc: int) -> None:
    if crc_of(cells, stats) != crc:
        raise DamagedChunk


def _cells(samples: Samples) -> Cells:
    return of_samples(samples.steps, samples.values)


def _stacked(parts: list[Floats]) -> Floats:
    """One below the other. Attempts may differ in depth: where one is shallower its rows end in NaN."""
    parts = [part for part in parts if len(part)] or parts[:1]
    widths = {part.shape[1] for part in parts}
    if len(widths) == 1:
        return np.concatenate(parts)
    stacked = np.full((sum(map(len, parts)), max(widths)), np.nan, np.result_type(*parts))
    at = 0
    for part in parts:
        stacked[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return stacked
