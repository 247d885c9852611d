"""Metrics of the user's own, as charts show them."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("run", sa.Column("quantities", sa.Text, nullable=False, server_default="{}"))
