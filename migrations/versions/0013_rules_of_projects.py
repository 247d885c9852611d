"""A version of a rule may be a project's own."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("rule_version", sa.Column("project", sa.String(128)))
