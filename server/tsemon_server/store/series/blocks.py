"""The coarse rollups of several chunks in a row as one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, insert, select

from tsemon_server.store import schema
from tsemon_server.store.series.cells import joined, merged, starts_of
from tsemon_server.store.series.chunks import crc_of, pack_coarse, unpack_coarse
from tsemon_server.store.streams import Stream

BITS_OF_CHUNK = 4
"""The last bits of a chunk's number are its place in its block, the others are the block's number."""
CHUNKS_PER_BLOCK = 1 << BITS_OF_CHUNK
BLOCK_BITS = 3
"""A cell of a block is made of about 8 coarse ones."""


def add_block(connection: Connection, stream: Stream, number: int) -> None:
    """Sum up the chunks of this number of block, metric by metric.

    A metric whose chunks differ in shape, or are damaged, has no block: its chunks are read one by one.
    """
    rows = coarse_rollups(connection, stream, number)
    blocks = [block for _, group in groupby(rows, key=lambda row: row[:2]) for block in summed_up(list(group))]
    if blocks:
        connection.execute(insert(schema.block), [{**stream._asdict(), "number": number, **block} for block in blocks])


def coarse_rollups(
    connection: Connection, stream: Stream, number: int, *only: ColumnElement[bool]
) -> list[Row[*tuple[Any, ...]]]:
    """Of the chunks of this number of block."""
    chunk = schema.chunk.c
    first = number * CHUNKS_PER_BLOCK
    rows = connection.execute(
        select(
            chunk.kind,
            chunk.metric,
            chunk.num_rows,
            chunk.num_columns,
            chunk.num_samples,
            chunk.coarse_shift,
            chunk.coarse_crc,
            chunk.coarse_cells,
            chunk.coarse,
        )
        .where(stream.of(schema.chunk), chunk.number >= first, chunk.number < first + CHUNKS_PER_BLOCK, *only)
        .order_by(chunk.kind, chunk.metric)
    ).all()
    return list(rows)


def summed_up(rows: list[Row[*tuple[Any, ...]]]) -> Iterator[dict[str, Any]]:
    """The block of one metric, or none."""
    kind, metric, num_rows, num_columns, *_ = rows[0]
    is_sound = all(crc_of(row.coarse_cells, row.coarse) == row.coarse_crc for row in rows)
    if not is_sound or {(row.num_rows, row.num_columns) for row in rows} != {(num_rows, num_columns)}:
        return
    num_entries = num_rows * num_columns
    cells = joined([unpack_coarse(row.coarse_cells, row.coarse, kind, num_entries) for row in rows])
    shift = max(row.coarse_shift for row in rows) + BLOCK_BITS
    cells = merged(cells, starts_of(cells.spans[:, 0] >> shift))
    spans, stats = pack_coarse(cells, kind)
    yield {
        "kind": kind,
        "metric": metric,
        "num_samples": sum(row.num_samples for row in rows),
        "first_step": int(cells.spans[:, 0].min()),
        "last_step": int(cells.spans[:, 1].max()),
        "num_rows": num_rows,
        "num_columns": num_columns,
        "shift": shift,
        "crc": crc_of(spans, stats),
        "cells": spans,
        "stats": stats,
    }
