"""Attempts have states of their own, and the rules remember each of them."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("attempt", sa.Column("state", sa.String(16), nullable=False, server_default="replaced"))
    op.add_column("attempt", sa.Column("heard_at", sa.Float(53), nullable=False, server_default="0"))
    op.create_index("attempt_of_key", "attempt", ["attempt_key"])
    is_current = "run.run_id = attempt.run_id AND run.attempt = attempt.attempt"
    for column, of_run in (("state", "state"), ("heard_at", "updated_at")):
        op.execute(
            f"UPDATE attempt SET {column} = (SELECT run.{of_run} FROM run WHERE {is_current}) "
            f"WHERE EXISTS (SELECT 1 FROM run WHERE {is_current})"
        )
    op.rename_table("rule_state", "rule_state_of_run")
    op.create_table(
        "rule_state",
        sa.Column("run_id", sa.String(32), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("run_id", "attempt", name="rule_state_of_attempt"),
    )
    op.execute("INSERT INTO rule_state (run_id, attempt, state) SELECT run_id, attempt, state FROM rule_state_of_run")
    op.drop_table("rule_state_of_run")
