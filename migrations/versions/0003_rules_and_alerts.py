"""Versions of rules, what they remember as bytes, acknowledgements, silences, and why an alert was over."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("attempt", sa.Column("frozen_blocks", sa.Text, nullable=False, server_default="[]"))
    op.create_index("segment_by_step", "segment", ["run_id", "attempt", "last_step"])
    # What the rules remembered is of no use to those of today: they begin anew, and with them what was pending. What
    # fires stays, for people to see, until the run's next attempt or its end.
    op.execute("DELETE FROM alert WHERE state = 'pending'")
    op.drop_table("rule_state")
    op.create_table(
        "rule_state",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "rule_checkpoint",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
    )
    op.add_column("alert", sa.Column("rule_version", sa.Integer))
    op.add_column("alert", sa.Column("resolved_reason", sa.String(16)))
    op.add_column("alert", sa.Column("acknowledged_at", sa.Float(53)))
    op.add_column("alert", sa.Column("acknowledged_by", sa.String(128)))
    op.add_column("alert", sa.Column("note", sa.Text))
    op.create_table(
        "silence",
        sa.Column("silence_id", sa.Integer, primary_key=True),
        sa.Column("rule", sa.String(128)),
        sa.Column("run", sa.String(256)),
        sa.Column("project", sa.String(128)),
        sa.Column("family", sa.String(32)),
        sa.Column("until", sa.Float(53), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("created_by", sa.String(128), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "rule_version",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("definition", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
    )
