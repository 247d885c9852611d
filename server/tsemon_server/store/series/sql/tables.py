"""The tables of the series."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Float, Index, Integer, LargeBinary, String, Table
from sqlalchemy.types import TypeEngine

from tsemon_server.store.schema import metadata

# kind: scalars, layers or heads
_KEYS: dict[str, TypeEngine[Any]] = {
    "run_id": String(32),
    "layout_id": BigInteger(),
    "kind": String(8),
    "metric": String(128),
    "attempt": Integer(),
    "writer": String(64),
    "seq": BigInteger(),
    "number": Integer(),
    "part": Integer(),
    "page": BigInteger(),
}


def _key(*names: str) -> list[Column[Any]]:
    """The columns of a primary key."""
    return [Column(name, _KEYS[name], primary_key=True, autoincrement=False) for name in names]


def _extent() -> list[Column[Any]]:
    """Which samples a chunk or a block holds, and their shape."""
    types = {"num_samples": Integer, "first_step": BigInteger, "last_step": BigInteger}
    shape = {"num_rows": Integer, "num_columns": Integer}
    return [Column(name, of, nullable=False) for name, of in (types | shape).items()]


layout = Table(
    "layout",
    metadata,
    *_key("run_id", "layout_id", "kind", "metric"),  # `layout_id` is a digest of what the rows say
    Column("offset_bytes", Integer, nullable=False),
    Column("num_rows", Integer, nullable=False),
    Column("num_columns", Integer, nullable=False),
)

frame = Table(
    "frame",
    metadata,
    *_key("run_id", "attempt", "writer", "seq"),
    Column("step", BigInteger, nullable=False),
    Column("time", Float(53), nullable=False),
    Column("layout_id", BigInteger, nullable=False),
    Column("blob", LargeBinary, nullable=False),
    # Of the blob and all before it, see `packing`; NULL in rows from before they were kept.
    Column("crcs", LargeBinary),
    Index("frame_by_step", "run_id", "step"),
)

# How many frames a run has, hot and settled. Whoever adds frames to a run, and whoever packs some, takes its row first.
tally = Table("tally", metadata, *_key("run_id"), Column("num_frames", BigInteger, nullable=False))

# Frames that have settled are moved, a few hundred of one writer at a time, from `frame` into one segment and one chunk
# per metric. `settled` tells which they were, so that a frame that comes once more is known at any age.

segment = Table(
    "segment",
    metadata,
    *_key("run_id", "attempt", "writer", "number"),
    Column("num_frames", Integer, nullable=False),
    Column("num_chunks", Integer, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("settled_at", Float(53), nullable=False),
    Column("finest", String(8), nullable=False),  # samples, fine or coarse: what retention has left of its chunks
    Column("frames", LargeBinary, nullable=False),  # packed: seq, step and time of each
    Index("segment_by_age", "finest", "settled_at", "run_id"),
    Index("segment_by_step", "run_id", "attempt", "last_step"),
)

chunk = Table(
    "chunk",
    metadata,
    # `number` is that of its segment; there is a `part` per shape that the metric has in the segment.
    *_key("run_id", "kind", "metric", "attempt", "writer", "number", "part"),
    *_extent(),
    # Rollups: the least, the mean and the largest value of all samples whose steps are the same but for the last
    # `..._shift` bits. Those rows come first that a chart over a long run reads.
    Column("coarse_shift", Integer, nullable=False),
    Column("fine_shift", Integer, nullable=False),
    Column("coarse_crc", BigInteger, nullable=False),
    Column("coarse_cells", LargeBinary, nullable=False),
    Column("coarse", LargeBinary, nullable=False),
    Column("fine", LargeBinary),  # packed; NULL once retention has dropped it
    Column("samples", LargeBinary),  # packed steps and values; NULL once retention has dropped them
)

# The coarse rollups of several chunks in a row as one, so that a chart over a million steps reads a hundred rows.
block = Table(
    "block",
    metadata,
    *_key("run_id", "kind", "metric", "attempt", "writer", "number"),  # `number` is chunk.number // 16
    *_extent(),
    Column("shift", Integer, nullable=False),
    Column("crc", BigInteger, nullable=False),
    Column("cells", LargeBinary, nullable=False),
    Column("stats", LargeBinary, nullable=False),
)

settled = Table(
    "settled",
    metadata,
    *_key("run_id", "attempt", "writer", "page"),  # `page` is seq // 512
    Column("seqs", LargeBinary, nullable=False),  # a bit per seq of the page
)

ALL = (frame, chunk, block, segment, settled, layout, tally)
