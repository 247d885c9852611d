"""The tables of the series."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, Integer, LargeBinary, String, Table

from tsemon_server.store.schema import metadata

layout = Table(
    "layout",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("layout_id", BigInteger, primary_key=True, autoincrement=False),  # a digest of what the rows say
    Column("kind", String(8), primary_key=True),  # scalars, layers or heads
    Column("metric", String(128), primary_key=True),
    Column("offset_bytes", Integer, nullable=False),
    Column("num_rows", Integer, nullable=False),
    Column("num_columns", Integer, nullable=False),
)

frame = Table(
    "frame",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("writer", String(64), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, nullable=False),
    Column("time", Float(53), nullable=False),
    Column("layout_id", BigInteger, nullable=False),
    Column("blob", LargeBinary, nullable=False),
    # Of the blob and all before it, see `packing`; NULL in rows from before they were kept.
    Column("crcs", LargeBinary),
    Index("frame_by_step", "run_id", "step"),
)

# How many frames a run has, hot and settled. Whoever adds frames to a run, and whoever packs some, takes its row first.
tally = Table(
    "tally",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("num_frames", BigInteger, nullable=False),
)

# Frames that have settled are moved, a few hundred of one writer at a time, from `frame` into one segment and one chunk
# per metric. `settled` tells which they were, so that a frame that comes once more is known at any age.

segment = Table(
    "segment",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("writer", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
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
    Column("run_id", String(32), primary_key=True),
    Column("kind", String(8), primary_key=True),
    Column("metric", String(128), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("writer", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # of its segment
    Column("part", Integer, primary_key=True, autoincrement=False),  # one per shape that the metric has in the segment
    Column("num_samples", Integer, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("num_rows", Integer, nullable=False),
    Column("num_columns", Integer, nullable=False),
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
    Column("run_id", String(32), primary_key=True),
    Column("kind", String(8), primary_key=True),
    Column("metric", String(128), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("writer", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # chunk.number // 16
    Column("num_samples", Integer, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("num_rows", Integer, nullable=False),
    Column("num_columns", Integer, nullable=False),
    Column("shift", Integer, nullable=False),
    Column("crc", BigInteger, nullable=False),
    Column("cells", LargeBinary, nullable=False),
    Column("stats", LargeBinary, nullable=False),
)

settled = Table(
    "settled",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("writer", String(64), primary_key=True),
    Column("page", BigInteger, primary_key=True, autoincrement=False),  # seq // 512
    Column("seqs", LargeBinary, nullable=False),  # a bit per seq of the page
)

ALL = (frame, chunk, block, segment, settled, layout, tally)
