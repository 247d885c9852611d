"""The tables of the ledger."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

from tsemon_server.store.schema import Json, metadata

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
    Column("quantities", Json, nullable=False, server_default="{}"),  # metrics of the user's own, by name
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
    Column("latest", Json),  # time and scalars of the newest frame; NULL where an older version stored it
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
    Column("stacks", Json),  # [{name, blocks}] in depth order; NULL where all blocks are one stack
    Column("not_measured", Json, nullable=False, server_default="{}"),  # by writer: seq of the frame, reason per metric
    Column("started_at", Float(53), nullable=False),
    Column("state", String(16), nullable=False),  # running, finished, failed; replaced: silent since a later one began
    Column("heard_at", Float(53), nullable=False),  # of its process, to a few seconds
    # A person asked for a zoom, and the process may not know it yet; and whether a response has told it.
    Column("zoom_asked_at", Float(53)),
    Column("is_zoom_told", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("run_id", "attempt_key", name="attempt_by_key"),
    Index("attempt_of_key", "attempt_key"),
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
    Column(
        "incident_id", Integer
    ),  # NULL before it fires, for alerts that only inform, and if it fired before incidents
    Index("alert_by_run", "run_id", "state"),
    Index("alert_by_update", "updated_at"),
    sqlite_autoincrement=True,  # the number of an alert that was withdrawn is not given to another
)

incident = Table(
    "incident",
    metadata,
    Column("incident_id", Integer, primary_key=True),
    Column("run_id", String(32), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("cause_id", Integer, nullable=False),  # the alert that is the likeliest cause
    Column("rule", String(128), nullable=False),
    Column("family", String(32), nullable=False),
    Column("severity", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("left_step", BigInteger, nullable=False),
    Column("settles_step", BigInteger, nullable=False),
    Column("first_block", Integer),
    Column("last_block", Integer),
    Column("ended_step", BigInteger),
    Column("opened_at", Float(53), nullable=False),
    Column("updated_at", Float(53), nullable=False),
    Index("incident_by_run", "run_id", "attempt"),
    Index("incident_by_state", "state"),
    sqlite_autoincrement=True,
)

rule_progress = Table(
    "rule_progress",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),  # another number after each reading
    Column("read_to", BigInteger, nullable=False),
    Column("num_read", Integer, nullable=False),
    Column("writers", Json, nullable=False),  # newest step and time of each
    Column("waiting_since", Float(53)),
    Column("late_from", BigInteger),
    Column("num_late", Integer, nullable=False),
    Column("claimed_from", BigInteger),
    Column("claim", BigInteger),  # another number for each process that reads late frames
    Column("num_skipped", Integer, nullable=False),
    Column("due_at", Float(53)),
    Index("rule_progress_due", "due_at"),
)

# What the rules remembered after some of the steps: from there on they read again after a restart, or if a frame comes late.
rule_checkpoint = Table(
    "rule_checkpoint",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("num_read", Integer, nullable=False),
    Column("state", LargeBinary, nullable=False),
)

# Which rules read the frames of an attempt, from the step after `after_step` on: the version of each.
rule_era = Table(
    "rule_era",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("after_step", BigInteger, nullable=False),
    Column("versions", Json, nullable=False),
)

# Rows are added and never changed: their number tells whether there is something new.
rule_version = Table(
    "rule_version",
    metadata,
    Column("name", String(128), primary_key=True),
    # One sequence for the server and all projects: an alert's rule and version say which definition opened it.
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("project", String(128)),  # NULL: of the whole server
    Column("origin", String(16), nullable=False),  # built-in or edited, or server: the project's own is given up
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

# What the rules on the clock remember of an attempt: what they saw of its process, and their own memory.
watched = Table(
    "watched",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
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
    # firing: it was not sent because nobody wanted to hear of it; resolved: it says that it is over though the run goes on
    Column("is_held", Boolean, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("error", Text),
    Column("labels", Json),  # rule, family and severity that it was first told under; NULL if told before incidents
    Column("thread", Text),  # thread of the message that was sent, if the receiver has threads
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

OF_RUN = (attempt, alert, incident, rule_progress, rule_checkpoint, rule_era, watched, notice, delivery)
"""Tables that hold something of a run besides its own row."""
