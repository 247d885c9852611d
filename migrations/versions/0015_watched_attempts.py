"""Time-based rules have a memory for each attempt."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.rename_table("watched", "watched_run")
    op.create_table(
        "watched",
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("pulse", sa.Text, nullable=False),
        sa.Column("rules", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", name="watched_attempt"),
    )
    op.execute(
        "INSERT INTO watched (run_id, attempt, pulse, rules) SELECT run_id, attempt, pulse, rules FROM watched_run"
    )
    op.drop_table("watched_run")
