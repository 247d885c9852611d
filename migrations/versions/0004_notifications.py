"""What people are to be told of alerts, and what they were told."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "notice",
        sa.Column("notice_id", sa.Integer, primary_key=True),
        sa.Column("alert_id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("has_fired", sa.Boolean, nullable=False),
        sa.Column("queued_at", sa.Float(53), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "delivery",
        sa.Column("delivery_id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("alert_id", sa.Integer, nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("receiver", sa.String(64), nullable=False),
        sa.Column("topic", sa.Text, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("is_held", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("repeat_s", sa.Float(53)),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("changed_at", sa.Float(53), nullable=False),
        sa.Column("tried_at", sa.Float(53)),
        sa.Column("sent_at", sa.Float(53)),
        sa.Column("due_at", sa.Float(53)),
        sa.UniqueConstraint("alert_id", "receiver", "turn", name="delivery_by_alert"),
        sqlite_autoincrement=True,
    )
    op.create_index("delivery_by_time", "delivery", ["receiver", "due_at"])
    op.create_index("delivery_by_topic", "delivery", ["receiver", "topic"])
    op.create_index("delivery_by_message", "delivery", ["receiver", "sent_at"])
    op.create_index("delivery_by_run", "delivery", ["run_id"])
