"""How many frames each run has, in a table of the series; the scalars of its newest frame, in its row."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "tally",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("num_frames", sa.BigInteger, nullable=False),
    )
    op.add_column("run", sa.Column("latest", sa.Text))
    op.execute("INSERT INTO tally (run_id, num_frames) SELECT run_id, num_frames FROM run")
