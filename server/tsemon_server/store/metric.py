"""One metric of a run, read from frames and chunks alike."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    String,
    Table,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal,
    select,
)

from tsemon_server.store import schema
from tsemon_server.store.blocks import BITS_OF_CHUNK
from tsemon_server.store.cells import Cells, Floats, Ints, joined, of_samples, smallest_shift
from tsemon_server.store.chunks import DamagedChunk, crc_of, unpack_coarse, unpack_fine, unpack_samples
from tsemon_server.store.packing import CRC_BYTES, PAGE_BYTES, Kind, are_pages_sound, item_bytes, item_type
from tsemon_server.store.prepared import Prepared

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


NO_MORE: Mapping[str, int] = {}


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
        self._queries = _queries(kind, entry is not None, attempt is not None)
        row, column = entry or (0, 0)
        self._values = {
            "run_id": run_id, "metric": metric, "row": row, "column": column, "from_step": self._from,
            "to_step": self._to, "attempt": attempt,
        }  # fmt: skip

    def samples(self) -> Samples:
        """All of them, those of one step in no order. What retention has reduced to rollups is not among them."""
        parts = [self._hot()]
        num_damaged = parts[0].num_damaged
        for row in self._rows(self._queries.samples):
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
        if extents:
            between = {"first": first + ends_alone, "last": last - ends_alone, "shift": shift}
            for query in (*self._add_blocks(parts, between), self._queries.inside):
                num_damaged += self._add_inside(parts, query, between)
        return Points(joined(parts), shift, num_damaged)

    def _plan(self, parts: list[Cells]) -> tuple[list[Extent], int]:
        """The extents of what is wholly inside, still to be read at the level that they ask for.

        Chunks that reach over an edge are added to `parts` at once. How many samples of those cannot be read comes second.
        """
        [(first, last, num_samples)] = self._rows(self._queries.extent_of_blocks)
        extents = [(first, last, int(num_samples))] if num_samples else []
        num_damaged = 0
        for row in self._rows(self._queries.alone):
            if row.is_inside:
                extents.append((row.first_step, row.last_step, row.num_samples))
            else:
                num_damaged += self._add_finest(row, parts)
        return extents, num_damaged

    # -- hot frames

    def _hot(self) -> Samples:
        # Rows of one layout are checked and cut together: one by one, that takes five times as long.
        alike: dict[tuple[int, ...], list[tuple[int, bytes, bytes | None]]] = {}
        rows = self._queries.hot.run(self._connection, self._values).fetchall()
        for step, pages, crcs, start, num_bytes in rows:
            sizes = (start, num_bytes, len(pages), -1 if crcs is None else len(crcs))
            alike.setdefault(sizes, []).append((step, pages, crcs))
        dtype = item_type(self._kind)
        steps, values = [np.empty(0, np.int64)], [np.empty((0, 1), dtype)]
        for (start, num_bytes, page_bytes, _), group in alike.items():
            if page_bytes >= start + num_bytes:
                steps_of, pages_of, crcs_of = zip(*group, strict=True)
                is_sound = are_pages_sound(pages_of, crcs_of)
                data = np.frombuffer(b"".join(pages_of), np.uint8).reshape(len(group), -1)
                steps.append(np.array(steps_of, np.int64)[is_sound])
                values.append(np.ascontiguousarray(data[is_sound, start : start + num_bytes]).view(dtype))
        found = np.concatenate(steps)
        if num_damaged := len(rows) - len(found):
            log.error("%d frames of run %s are damaged; `tsemon admin check` lists them all", num_damaged, self._run_id)
        order = np.argsort(found, kind="stable")
        return Samples(found[order], _stacked(values)[order], num_damaged)

    # -- chunks and blocks

    def _add_blocks(self, parts: list[Cells], between: Mapping[str, int]) -> list[Select[Any]]:
        """Add the cells of blocks; what reads the chunks in place of those that are damaged."""
        chunk, found, in_place = schema.chunk.c, _Coarse(self._kind), []
        for cells, stats, crc, attempt, writer, number, *shape in self._rows(self._queries.blocks, between):
            if crc_of(cells, stats) == crc:
                found.add(cells, stats, *shape)
                continue
            log.error("block %d of %s in run %s is damaged; its chunks are read", number, self._metric, self._run_id)
            is_of_block = chunk.number.bitwise_rshift(BITS_OF_CHUNK) == number
            is_wanted = and_(chunk.attempt == attempt, chunk.writer == writer, is_of_block)
            in_place.append(self._queries.finest_enough(is_wanted))
        parts += [Cells(spans, self._of_entry(stats, columns)) for spans, stats, columns in found.cells()]
        return in_place

    def _add_inside(self, parts: list[Cells], query: Select[Any], between: Mapping[str, int]) -> int:
        """Add the cells of chunks that are wholly inside; how many samples cannot be read."""
        coarse, num_damaged = _Coarse(self._kind), 0
        for row in self._rows(query, between):
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
        [stored] = self._rows(
            self._queries.only(
                select(chunk.samples, chunk.fine, chunk.coarse, chunk.coarse_cells, chunk.coarse_crc),
                schema.chunk,
                and_(
                    chunk.attempt == row.attempt,
                    chunk.writer == row.writer,
                    chunk.number == row.number,
                    chunk.part == row.part,
                ),
            )
        )
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

    def _rows(self, query: Select[Any], more: Mapping[str, int] = NO_MORE) -> Sequence[Row[*tuple[Any, ...]]]:
        return self._connection.execute(query, {**self._values, **more}).all()

    def _report(self, row: Row[Any], what: str) -> int:
        log.error(
            "the %s of %s %s in run %s, attempt %d, writer %s, chunk %d are damaged; `tsemon admin check` lists them all",
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


def slot_of(layout: Any, frame: Any, kind: Kind, metric: Any) -> ColumnElement[bool]:
    """Joins a frame with where the metric lies in it."""
    return and_(
        layout.run_id == frame.run_id,
        layout.layout_id == frame.layout_id,
        layout.kind == kind,
        layout.metric == metric,
    )


class _Queries:
    """What is asked of a metric, built once: that takes ten times as long as to run it.

    The values come later: of one entry or of all, of one attempt or of all that no later one hides.
    """

    def __init__(self, kind: Kind, is_of_entry: bool, is_of_attempt: bool) -> None:
        self._kind, self._is_of_attempt = kind, is_of_attempt
        chunk, block = schema.chunk.c, schema.block.c
        self.hot = Prepared(self._hot(is_of_entry))
        overlaps = and_(chunk.last_step >= _FROM, chunk.first_step <= _TO)
        self.samples = self._chunks(overlaps, chunk.samples)
        inside, block_is_inside = (self._is_inside(table, _FROM, _TO) for table in (schema.chunk, schema.block))
        extent = select(func.min(block.first_step), func.max(block.last_step), func.sum(block.num_samples))
        self.extent_of_blocks = self.only(extent, schema.block, block_is_inside)
        is_alone = and_(overlaps, ~self._is_in_block(block_is_inside))
        self.alone = self._chunks(is_alone, chunk.first_step, chunk.last_step, inside.label("is_inside"))
        in_blocks = and_(self._is_inside(schema.block, _FIRST, _LAST), block.shift <= _SHIFT)
        about = (block.attempt, block.writer, block.number, block.num_rows, block.num_columns)
        self.blocks = self.only(select(block.cells, block.stats, block.crc, *about), schema.block, in_blocks)
        self.inside = self.finest_enough(and_(inside, ~self._is_in_block(in_blocks)))

    def finest_enough(self, where: ColumnElement[bool]) -> Select[Any]:
        """Of these chunks, which are wholly inside, the coarsest level that is fine enough."""
        chunk, may_roll = schema.chunk.c, self._is_inside(schema.chunk, _FIRST, _LAST)
        level = case(
            (and_(may_roll, chunk.coarse_shift <= _SHIFT), "coarse"),
            (and_(may_roll, chunk.fine_shift <= _SHIFT, chunk.fine.is_not(None)), "fine"),
            (chunk.samples.is_not(None), "samples"),
            (chunk.fine.is_not(None), "fine"),
            else_="coarse",
        )
        blob = case((level == "coarse", chunk.coarse), (level == "fine", chunk.fine), else_=chunk.samples)
        return self._chunks(where, level.label("level"), blob.label("blob"), chunk.coarse_cells, chunk.coarse_crc)

    def only(self, query: Select[Any], table: Table, where: ColumnElement[bool]) -> Select[Any]:
        """The chunks or blocks of the metric, as far as they are visible."""
        c = table.c
        query = query.select_from(table).where(
            c.run_id == _RUN,
            c.kind == self._kind,
            c.metric == _METRIC,
            c.num_rows > _ROW,
            c.num_columns > _COLUMN,
            where,
        )
        return self._visible(query, c.attempt, c.first_step)

    def _hot(self, is_of_entry: bool) -> Select[Any]:
        frame, layout = schema.frame, schema.layout
        width = item_bytes(self._kind)
        position = _ROW * layout.c.num_columns + _COLUMN
        num_bytes = width * (literal(1) if is_of_entry else layout.c.num_rows * layout.c.num_columns)
        start = layout.c.offset_bytes + position * width
        first, end = start // PAGE_BYTES, (start + num_bytes - 1) // PAGE_BYTES + 1
        pages = func.substr(frame.c.blob, first * PAGE_BYTES + 1, (end - first) * PAGE_BYTES)
        crcs = func.substr(frame.c.crcs, first * CRC_BYTES + 1, (end - first + 1) * CRC_BYTES)
        query = (
            select(frame.c.step, pages, crcs, start % PAGE_BYTES, num_bytes)
            .join(layout, slot_of(layout.c, frame.c, self._kind, _METRIC))
            .where(
                frame.c.run_id == _RUN,
                frame.c.step >= _FROM,
                frame.c.step <= _TO,
                layout.c.num_rows > _ROW,
                layout.c.num_columns > _COLUMN,
            )
            .order_by(frame.c.step)
        )
        return self._visible(query, frame.c.attempt, frame.c.step)

    def _visible(self, query: Select[Any], attempt: Any, first_step: Any) -> Select[Any]:
        """Only of this attempt, or of all attempts as far as no later one hides them."""
        if self._is_of_attempt:
            return query.where(attempt == _ATTEMPT)
        return query.join(
            schema.attempt,
            and_(
                schema.attempt.c.run_id == _RUN,
                schema.attempt.c.attempt == attempt,
                schema.attempt.c.hidden_from > first_step,
            ),
        )

    def _chunks(self, where: ColumnElement[bool], *columns: Any) -> Select[Any]:
        """What they are, and `columns`."""
        chunk = schema.chunk.c
        hidden_from = literal(schema.NEVER) if self._is_of_attempt else schema.attempt.c.hidden_from
        about = (chunk.attempt, chunk.writer, chunk.number, chunk.part, chunk.num_samples, chunk.num_rows)
        query = select(*about, chunk.num_columns, hidden_from.label("hidden_from"), *columns)
        return self.only(query, schema.chunk, where)

    def _is_inside(self, table: Table, first: Bound, last: Bound) -> ColumnElement[bool]:
        """Whether all of a chunk or a block is visible and within these steps."""
        inside = and_(table.c.first_step >= first, table.c.last_step <= last)
        return inside if self._is_of_attempt else and_(inside, table.c.last_step < schema.attempt.c.hidden_from)

    def _is_in_block(self, where: ColumnElement[bool]) -> ColumnElement[bool]:
        """Whether a chunk is part of a block for which `where` holds."""
        chunk, block = schema.chunk.c, schema.block.c
        return exists().where(
            block.run_id == _RUN,
            block.kind == self._kind,
            block.metric == _METRIC,
            block.attempt == chunk.attempt,
            block.writer == chunk.writer,
            block.number == chunk.number.bitwise_rshift(BITS_OF_CHUNK),
            where,
        )


Bound = BindParameter[Any]
_RUN, _METRIC = (bindparam(name, type_=String) for name in ("run_id", "metric"))
_ROW, _COLUMN, _ATTEMPT, _SHIFT = (bindparam(name, type_=Integer) for name in ("row", "column", "attempt", "shift"))
_FROM, _TO, _FIRST, _LAST = (bindparam(name, type_=BigInteger) for name in ("from_step", "to_step", "first", "last"))

_queries = functools.cache(_Queries)


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
