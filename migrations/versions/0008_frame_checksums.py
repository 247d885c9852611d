"""Checksums of the frames that have not settled; NULL for older frames."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("frame", sa.Column("crcs", sa.LargeBinary))
