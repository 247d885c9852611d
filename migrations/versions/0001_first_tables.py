"""The first tables.

A migration repeats the tables of its own time. Those of today are in `tables.py` of `store/ledger` and `store/series/sql`. A
test holds the last migration and the tables together.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "run",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("project", sa.String(128), nullable=False),
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("tags", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("updated_at", sa.Float(53), nullable=False),
        sa.Column("num_frames", sa.BigInteger, nullable=False),
        sa.Column("last_attempt", sa.Integer),
        sa.Column("last_writer", sa.String(64)),
        sa.Column("last_seq", sa.BigInteger),
        sa.Column("last_step", sa.BigInteger),
        sa.Column("loss", sa.Float(53)),
        sa.UniqueConstraint("project", "run", name="run_by_name"),
    )
    op.create_table(
        "attempt",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("attempt_key", sa.String(64)),
        sa.Column("resume_step", sa.BigInteger),
        sa.Column("hidden_from", sa.BigInteger, nullable=False),
        sa.Column("blocks", sa.Text, nullable=False),
        sa.Column("started_at", sa.Float(53), nullable=False),
        sa.UniqueConstraint("run_id", "attempt_key", name="attempt_by_key"),
    )
    op.create_table(
        "layout",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("layout_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(8), primary_key=True),
        sa.Column("metric", sa.String(128), primary_key=True),
        sa.Column("offset_bytes", sa.Integer, nullable=False),
        sa.Column("num_rows", sa.Integer, nullable=False),
        sa.Column("num_columns", sa.Integer, nullable=False),
    )
    op.create_table(
        "frame",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("writer", sa.String(64), primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("time", sa.Float(53), nullable=False),
        sa.Column("layout_id", sa.BigInteger, nullable=False),
        sa.Column("blob", sa.LargeBinary, nullable=False),
    )
    op.create_index("frame_by_step", "frame", ["run_id", "step"])
    op.create_table(
        "alert",
        sa.Column("alert_id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("rule", sa.String(128), nullable=False),
        sa.Column("family", sa.String(32), nullable=False),
        sa.Column("severity", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("pending_step", sa.BigInteger, nullable=False),
        sa.Column("firing_step", sa.BigInteger),
        sa.Column("resolved_step", sa.BigInteger),
        sa.Column("summary", sa.Text, nullable=False),
        sa.Column("evidence", sa.Text, nullable=False),
        sa.Column("advice", sa.Text, nullable=False),
        sa.Column("opened_at", sa.Float(53), nullable=False),
        sa.Column("updated_at", sa.Float(53), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("alert_by_run", "alert", ["run_id", "state"])
    op.create_table(
        "rule_state",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("tracks", sa.Text, nullable=False),
    )
