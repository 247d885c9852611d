"""The tables. All keys hold run_id, so that a cluster can shard by it; times are seconds since 1970, UTC."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
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
LARGEST = 2**31 - 1
"""What a column of the kind Integer holds."""


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
    # Where the training process is, which need not be a step that was sampled, and when it was first heard to be there.
    Column("process_step", BigInteger),
    Column("stepped_at", Float(53)),
    UniqueConstraint("project", "run", name="run_by_name"),
    Index("run_by_update", "updated_at", "run_id"),
    Index("run_by_title", "run", "project"),
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
    Column("frozen_blocks", Json, nullable=False, server_default="[]"),  # indexes of those that shall not learn
    Column("not_measured", Json, nullable=False, server_default="{}"),  # by writer: seq of the frame, reason per metric
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
    Column(
        "crcs", LargeBinary
    ),  # of the blob and all before it, see `packing`; NULL in rows from before they were kept
    Index("frame_by_step", "run_id", "step"),
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
    Column("rule_version", Integer),  # NULL where it opened before versions were kept
    Column("resolved_reason", String(16)),
    Column("acknowledged_at", Float(53)),
    Column("acknowledged_by", String(128)),
    Column("note", Text),
    Index("alert_by_run", "run_id", "state"),
    Index("alert_by_update", "updated_at"),
    sqlite_autoincrement=True,  # the number of an alert that was withdrawn is not given to another
)

rule_state = Table(
    "rule_state",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("state", LargeBinary, nullable=False),
)

# What the rules remembered a little earlier, so that a frame that comes late is looked at in its place.
rule_checkpoint = Table(
    "rule_checkpoint",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("state", LargeBinary, nullable=False),
)

# Rows are added and never changed: their number tells whether there is something new.
rule_version = Table(
    "rule_version",
    metadata,
    Column("name", String(128), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("origin", String(16), nullable=False),  # built-in or edited
    Column("enabled", Boolean, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("definition", Json, nullable=False),
    Column("created_at", Float(53), nullable=False),
)

silence = Table(
    "silence",
    metadata,
    Column("silence_id", Integer, primary_key=True),
    # What an alert must be to be silenced; NULL is anything.
    Column("rule", String(128)),
    Column("run", String(256)),  # a pattern with * and ?
    Column("project", String(128)),
    Column("family", String(32)),
    Column("until", Float(53), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("created_by", String(128), nullable=False),
    Column("reason", Text, nullable=False),
    sqlite_autoincrement=True,
)

# What the rules on the clock remember of a run: what they saw of its process, and their own memory.
watched = Table(
    "watched",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("pulse", Json, nullable=False),
    Column("rules", LargeBinary, nullable=False),
)

# An alert has changed, and who is to hear of it is still to be found out.
notice = Table(
    "notice",
    metadata,
    Column("notice_id", Integer, primary_key=True),
    Column("alert_id", Integer, nullable=False),
    Column("run_id", String(32), nullable=False),
    Column("has_fired", Boolean, nullable=False),  # so that it is told of, even if it is over by now
    Column("queued_at", Float(53), nullable=False),
    sqlite_autoincrement=True,
)

# What one receiver is to be told, or was: by turns that an alert fires, and that it is over.
delivery = Table(
    "delivery",
    metadata,
    Column("delivery_id", Integer, primary_key=True),
    Column("run_id", String(32), nullable=False),
    Column("alert_id", Integer, nullable=False),
    Column("turn", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("receiver", String(64), nullable=False),
    Column("topic", Text, nullable=False),
    Column("status", String(16), nullable=False),
    Column("is_held", Boolean, nullable=False),  # it was not sent because nobody wanted to hear of it
    Column("attempts", Integer, nullable=False),
    Column("error", Text),
    Column("repeat_s", Float(53)),
    Column("created_at", Float(53), nullable=False),
    Column("changed_at", Float(53), nullable=False),
    Column("tried_at", Float(53)),  # when it was tried in vain first, since it was last sent
    Column("sent_at", Float(53)),
    Column("due_at", Float(53)),  # when it is sent, or sent again; NULL once there is nothing more to send
    UniqueConstraint("alert_id", "receiver", "turn", name="delivery_by_alert"),
    Index("delivery_by_time", "receiver", "due_at"),
    Index("delivery_by_topic", "receiver", "topic"),
    Index("delivery_by_message", "receiver", "sent_at"),
    Index("delivery_by_run", "run_id"),
    sqlite_autoincrement=True,
)

retention = Table(
    "retention",
    metadata,
    Column("project", String(128), primary_key=True),
    # Seconds; NULL keeps for ever.
    Column("samples_s", Float(53)),
    Column("rollups_s", Float(53)),
    Column("runs_s", Float(53)),
)

# Runs that were deleted and whose frames are still to be removed, a few at a time.
tombstone = Table("tombstone", metadata, Column("run_id", String(32), primary_key=True))

token = Table(
    "token",
    metadata,
    Column("token_id", String(32), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("digest", String(64), nullable=False),  # SHA-256 of the secret, which is random: it needs no salt
    Column("scopes", Json, nullable=False),
    Column("project", String(128)),  # NULL is all
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53)),
    Column("revoked_at", Float(53)),
    Column("last_used_at", Float(53)),
)

# Work that one process at a time does: who has it, and until when unless it says so again.
lease = Table(
    "lease",
    metadata,
    Column("work", String(64), primary_key=True),
    Column("holder", String(64), nullable=False),
    Column("until", Float(53), nullable=False),
)
