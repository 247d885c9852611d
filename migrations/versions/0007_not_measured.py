"""Why metrics are not measured; alerts by when they changed."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("attempt", sa.Column("not_measured", sa.Text, nullable=False, server_default="{}"))
    op.create_index("alert_by_update", "alert", ["updated_at"])
