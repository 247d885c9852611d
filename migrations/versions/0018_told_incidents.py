"""A delivery keeps the rule, family and severity that its incident had in the first message."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("delivery", sa.Column("labels", sa.Text))
