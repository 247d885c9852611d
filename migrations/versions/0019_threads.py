"""A delivery keeps the thread of its message, so that the next message on the incident is sent to the same one."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.add_column("delivery", sa.Column("thread", sa.Text))
