"""Alerts of an attempt that belong together are an incident."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "incident",
        sa.Column("incident_id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("cause_id", sa.Integer, nullable=False),
        sa.Column("rule", sa.String(128), nullable=False),
        sa.Column("family", sa.String(32), nullable=False),
        sa.Column("severity", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("left_step", sa.BigInteger, nullable=False),
        sa.Column("settles_step", sa.BigInteger, nullable=False),
        sa.Column("first_block", sa.Integer),
        sa.Column("last_block", sa.Integer),
        sa.Column("ended_step", sa.BigInteger),
        sa.Column("opened_at", sa.Float(53), nullable=False),
        sa.Column("updated_at", sa.Float(53), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("incident_by_run", "incident", ["run_id", "attempt"])
    op.create_index("incident_by_state", "incident", ["state"])
    op.add_column("alert", sa.Column("incident_id", sa.Integer))
