"""The coarse rollups of several chunks in a row as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from tsemon_server.store.series.cells import joined, merged, starts_of
from tsemon_server.store.series.chunks import crc_of, pack_coarse, unpack_coarse

BITS_OF_CHUNK = 4
"""The last bits of a chunk's number are its place in its block, the others are the block's number."""
CHUNKS_PER_BLOCK = 1 << BITS_OF_CHUNK
BLOCK_BITS = 3
"""A cell of a block is made of about 8 coarse ones."""


def blocks_of(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Sum up the chunks of one block, which are sorted by kind and metric: one block per metric.

    A metric whose chunks differ in shape, or are damaged, has no block: its chunks are read one by one.
    """
    return [
        block for _, group in groupby(rows, key=lambda row: (row.kind, row.metric)) for block in summed_up(list(group))
    ]


def summed_up(rows: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The block of one metric, or none."""
    kind, metric, num_rows, num_columns = rows[0].kind, rows[0].metric, rows[0].num_rows, rows[0].num_columns
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
