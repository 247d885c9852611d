"""The rows of one metric."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Integer,
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

from tsemon_server.store.prepared import Prepared
from tsemon_server.store.series.blocks import BITS_OF_CHUNK
from tsemon_server.store.series.packing import CRC_BYTES, PAGE_BYTES, Kind, item_bytes
from tsemon_server.store.series.sql import tables
from tsemon_server.store.series.sql.spans import SPAN, has_frame, holds, overlaps, values_of
from tsemon_server.store.streams import Visible

_chunk, _block = tables.chunk.c, tables.block.c


class SqlMetricRows:
    """MetricRows of one run. `entry` is a row and a column; without it, all are read."""

    def __init__(
        self,
        connection: Connection,
        run_id: str,
        visible: Visible,
        kind: Kind,
        metric: str,
        entry: tuple[int, int] | None,
    ) -> None:
        self._connection, self._queries = connection, _queries(kind, entry is not None)
        row, column = entry or (0, 0)
        place = {"row": row, "column": column}
        self._values: dict[str, Any] = {"run_id": run_id, "metric": metric, "visible": values_of(visible), **place}

    def hot(self) -> Sequence[Any]:
        return self._queries.hot.run(self._connection, self._values).fetchall()  # type: ignore[no-any-return]

    def extent_of_blocks(self) -> Any:
        return self._rows(self._queries.extent_of_blocks)[0]

    def alone(self) -> Sequence[Any]:
        return self._rows(self._queries.alone)

    def blocks(self, between: Mapping[str, int]) -> Sequence[Any]:
        return self._rows(self._queries.blocks, between)

    def inside(self, between: Mapping[str, int]) -> Sequence[Any]:
        return self._rows(self._queries.inside, between)

    def of_block(self, block: Any, between: Mapping[str, int]) -> Sequence[Any]:
        number = _chunk.number.bitwise_rshift(BITS_OF_CHUNK)
        where = and_(_chunk.attempt == block.attempt, _chunk.writer == block.writer, number == block.number)
        return self._rows(self._queries.finest_enough(where), between)

    def levels(self, chunk: Any) -> Any:
        key = ("attempt", "writer", "number", "part")
        query = select(_chunk.samples, _chunk.fine, _chunk.coarse, _chunk.coarse_cells, _chunk.coarse_crc)
        is_it = and_(*(_chunk[name] == getattr(chunk, name) for name in key))
        return self._rows(self._queries.of_metric(query, tables.chunk).where(is_it))[0]

    def samples(self) -> Sequence[Any]:
        return self._rows(self._queries.samples)

    def num_rows(self) -> int:
        return max(self._rows(query)[0][0] or 0 for query in self._queries.num_rows)

    def _rows(self, query: Select[Any], more: Mapping[str, int] | None = None) -> Sequence[Any]:
        return self._connection.execute(query, {**self._values, **(more or {})}).all()


class _Queries:
    """What is asked of a metric, built once: that takes ten times as long as to run it.

    The values come later: of one entry or of all.
    """

    def __init__(self, kind: Kind, is_of_entry: bool) -> None:
        self._kind = kind
        self.hot = Prepared(self._hot(is_of_entry))
        self.samples = self._chunks(_chunk.samples)
        extent = select(func.min(_block.first_step), func.max(_block.last_step), func.sum(_block.num_samples))
        self.extent_of_blocks = self._visible(extent, tables.block).where(holds(tables.block))
        is_inside = holds(tables.chunk).label("is_inside")
        self.alone = self._chunks(_chunk.first_step, _chunk.last_step, is_inside).where(~self._is_in_block())
        in_blocks = and_(_block.first_step >= _FIRST, _block.last_step <= _LAST, _block.shift <= _SHIFT)
        about = (_block.attempt, _block.writer, _block.number, _block.num_rows, _block.num_columns)
        blocks = self._visible(select(_block.cells, _block.stats, _block.crc, *about), tables.block)
        self.blocks = blocks.where(holds(tables.block), in_blocks)
        self.inside = self.finest_enough(and_(holds(tables.chunk), ~self._is_in_block(in_blocks)))
        hot_rows = self._hot_frames(select(func.max(tables.layout.c.num_rows)))
        self.num_rows = hot_rows, self._visible(select(func.max(_chunk.num_rows)), tables.chunk)

    def finest_enough(self, where: ColumnElement[bool]) -> Select[Any]:
        """Of these chunks, which are wholly inside, the coarsest level that is fine enough."""
        may_roll = and_(_chunk.first_step >= _FIRST, _chunk.last_step <= _LAST)
        level = case(
            (and_(may_roll, _chunk.coarse_shift <= _SHIFT), "coarse"),
            (and_(may_roll, _chunk.fine_shift <= _SHIFT, _chunk.fine.is_not(None)), "fine"),
            (_chunk.samples.is_not(None), "samples"),
            (_chunk.fine.is_not(None), "fine"),
            else_="coarse",
        )
        blob = case((level == "coarse", _chunk.coarse), (level == "fine", _chunk.fine), else_=_chunk.samples)
        found = (level.label("level"), blob.label("blob"), _chunk.coarse_cells, _chunk.coarse_crc)
        return self._chunks(*found).where(where)

    def of_metric(self, query: Select[Any], table: Table) -> Select[Any]:
        """The chunks or blocks of the metric that have the entry."""
        c = table.c
        return query.where(
            c.run_id == _RUN, c.kind == self._kind, c.metric == _METRIC, c.num_rows > _ROW, c.num_columns > _COLUMN
        )

    def _visible(self, query: Select[Any], table: Table) -> Select[Any]:
        """As far as they are visible."""
        return self.of_metric(query.select_from(table).join(SPAN, overlaps(table)), table)

    def _chunks(self, *columns: Any) -> Select[Any]:
        """What they are, and `columns`."""
        about = (_chunk.attempt, _chunk.writer, _chunk.number, _chunk.part, _chunk.num_samples, _chunk.num_rows)
        query = select(*about, _chunk.num_columns, SPAN.c.from_step, SPAN.c.to_step, *columns)
        return self._visible(query, tables.chunk)

    def _is_in_block(self, *where: ColumnElement[bool]) -> ColumnElement[bool]:
        """Whether a chunk is part of a block that is wholly visible."""
        return exists().where(
            _block.run_id == _RUN,
            _block.kind == self._kind,
            _block.metric == _METRIC,
            _block.attempt == _chunk.attempt,
            _block.writer == _chunk.writer,
            _block.number == _chunk.number.bitwise_rshift(BITS_OF_CHUNK),
            holds(tables.block),
            *where,
        )

    def _hot(self, is_of_entry: bool) -> Select[Any]:
        frame, layout = tables.frame.c, tables.layout.c
        width = item_bytes(self._kind)
        position = _ROW * layout.num_columns + _COLUMN
        num_bytes = width * (literal(1) if is_of_entry else layout.num_rows * layout.num_columns)
        start = layout.offset_bytes + position * width
        first, end = start // PAGE_BYTES, (start + num_bytes - 1) // PAGE_BYTES + 1
        pages = func.substr(frame.blob, first * PAGE_BYTES + 1, (end - first) * PAGE_BYTES)
        crcs = func.substr(frame.crcs, first * CRC_BYTES + 1, (end - first + 1) * CRC_BYTES)
        return self._hot_frames(select(frame.step, pages, crcs, start % PAGE_BYTES, num_bytes))

    def _hot_frames(self, query: Select[Any]) -> Select[Any]:
        frame, layout = tables.frame, tables.layout
        its_slot = and_(
            layout.c.run_id == frame.c.run_id,
            layout.c.layout_id == frame.c.layout_id,
            layout.c.kind == self._kind,
            layout.c.metric == _METRIC,
        )
        query = query.select_from(frame).join(layout, its_slot).join(SPAN, has_frame(frame))
        return query.where(frame.c.run_id == _RUN, layout.c.num_rows > _ROW, layout.c.num_columns > _COLUMN)


_RUN, _METRIC = (bindparam(name, type_=String) for name in ("run_id", "metric"))
_ROW, _COLUMN, _SHIFT = (bindparam(name, type_=Integer) for name in ("row", "column", "shift"))
_FIRST, _LAST = (bindparam(name, type_=BigInteger) for name in ("first", "last"))

_queries = functools.cache(_Queries)
