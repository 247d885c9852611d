"""The tables. All keys hold run_id, so that a cluster can shard by it; times are seconds since 1970, UTC."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

NEVER = 2**63 - 1
"""A step that no run reaches."""


class Json(TypeDecorator[Any]):
    """JSON in a text column. Not the engine's own type: the state of a rule may hold NaN, which PostgreSQL refuses."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        return json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


metadata = MetaData()

run = Table(
    "run",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("project", String(128), nullable=False),
    Column("run", String(128), nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempt", Integer, nullable=False),  # the current one
    Column("config", Json, nullable=False),
    Column("tags", Json, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("updated_at", Float(53), nullable=False),
    # Summaries for lists and /metrics, kept by the transaction that stores the frames: a list reads no frame.
    Column("num_frames", BigInteger, nullable=False),
    Column("last_attempt", Integer),
    Column("last_writer", String(64)),
    Column("last_seq", BigInteger),
    Column("last_step", BigInteger),
    Column("loss", Float(53)),
    UniqueConstraint("project", "run", name="run_by_name"),
)

attempt = Table(
    "attempt",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("attempt_key", String(64)),
    Column("resume_step", BigInteger),
    Column("hidden_from", BigInteger, nullable=False),  # later attempts hide this one's frames from this step on
    Column("blocks", Json, nullable=False),
    Column("started_at", Float(53), nullable=False),
    UniqueConstraint("run_id", "attempt_key", name="attempt_by_key"),
)

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
    Index("frame_by_step", "run_id", "step"),
)

alert = Table(
    "alert",
    metadata,
    Column("alert_id", Integer, primary_key=True),
    Column("run_id", String(32), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("rule", String(128), nullable=False),
    Column("family", String(32), nullable=False),
    Column("severity", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("pending_step", BigInteger, nullable=False),
    Column("firing_step", BigInteger),
    Column("resolved_step", BigInteger),
    Column("summary", Text, nullable=False),
    Column("evidence", Json, nullable=False),
    Column("advice", Json, nullable=False),
    Column("opened_at", Float(53), nullable=False),
    Column("updated_at", Float(53), nullable=False),
    Index("alert_by_run", "run_id", "state"),
    sqlite_autoincrement=True,  # the number of an alert that was withdrawn is not given to another
)

rule_state = Table(
    "rule_state",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),  # the last one that the rules saw
    Column("tracks", Json, nullable=False),  # per rule
)
