"""What the rules on the clock remember of runs."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "watched",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("pulse", sa.Text, nullable=False),
        sa.Column("rules", sa.LargeBinary, nullable=False),
    )
