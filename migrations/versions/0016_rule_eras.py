"""Each attempt has the versions of the rules by step, and a number for the process that reads its late frames."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.create_table(
        "rule_era",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("after_step", sa.BigInteger, nullable=False),
        sa.Column("versions", sa.Text, nullable=False),
    )
    op.add_column("rule_progress", sa.Column("claim", sa.BigInteger))
