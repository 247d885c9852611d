"""The stacks that the blocks of a model form."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("attempt", sa.Column("stacks", sa.Text))
