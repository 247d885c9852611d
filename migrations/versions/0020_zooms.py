"""An attempt keeps the request of a person for a zoom until its process has had it."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("attempt", sa.Column("zoom_asked_at", sa.Float(53)))
    op.add_column("attempt", sa.Column("is_zoom_told", sa.Boolean, nullable=False, server_default=sa.false()))
