"""Settled frames in chunks with rollups, retention, and where the training process is."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("run", sa.Column("process_step", sa.BigInteger))
    op.add_column("run", sa.Column("stepped_at", sa.Float(53)))
    op.create_index("run_by_update", "run", ["updated_at", "run_id"])
    op.create_index("run_by_title", "run", ["run", "project"])
    op.create_table(
        "segment",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("writer", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("num_frames", sa.Integer, nullable=False),
        sa.Column("num_chunks", sa.Integer, nullable=False),
        sa.Column("first_step", sa.BigInteger, nullable=False),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("settled_at", sa.Float(53), nullable=False),
        sa.Column("finest", sa.String(8), nullable=False),
        sa.Column("frames", sa.LargeBinary, nullable=False),
    )
    op.create_index("segment_by_age", "segment", ["finest", "settled_at", "run_id"])
    op.create_table(
        "chunk",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("kind", sa.String(8), primary_key=True),
        sa.Column("metric", sa.String(128), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("writer", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("num_samples", sa.Integer, nullable=False),
        sa.Column("first_step", sa.BigInteger, nullable=False),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("num_rows", sa.Integer, nullable=False),
        sa.Column("num_columns", sa.Integer, nullable=False),
        sa.Column("coarse_shift", sa.Integer, nullable=False),
        sa.Column("fine_shift", sa.Integer, nullable=False),
        sa.Column("coarse_crc", sa.BigInteger, nullable=False),
        sa.Column("coarse_cells", sa.LargeBinary, nullable=False),
        sa.Column("coarse", sa.LargeBinary, nullable=False),
        sa.Column("fine", sa.LargeBinary),
        sa.Column("samples", sa.LargeBinary),
    )
    op.create_table(
        "block",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("kind", sa.String(8), primary_key=True),
        sa.Column("metric", sa.String(128), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("writer", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("num_samples", sa.Integer, nullable=False),
        sa.Column("first_step", sa.BigInteger, nullable=False),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("num_rows", sa.Integer, nullable=False),
        sa.Column("num_columns", sa.Integer, nullable=False),
        sa.Column("shift", sa.Integer, nullable=False),
        sa.Column("crc", sa.BigInteger, nullable=False),
        sa.Column("cells", sa.LargeBinary, nullable=False),
        sa.Column("stats", sa.LargeBinary, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        for column in ("coarse", "fine", "samples"):  # packed already, PostgreSQL would try in vain to do it again
            op.execute(f"ALTER TABLE chunk ALTER COLUMN {column} SET STORAGE EXTERNAL")
        op.execute("ALTER TABLE frame ALTER COLUMN blob SET STORAGE EXTERNAL")
        # Frames come and go by hundreds: where a share of the table decides when their room is used again, it doubles.
        op.execute(
            "ALTER TABLE frame SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, "
            "toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 2000)"
        )
    op.create_table(
        "settled",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("writer", sa.String(64), primary_key=True),
        sa.Column("page", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("seqs", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "retention",
        sa.Column("project", sa.String(128), primary_key=True),
        sa.Column("samples_s", sa.Float(53)),
        sa.Column("rollups_s", sa.Float(53)),
        sa.Column("runs_s", sa.Float(53)),
    )
    op.create_table("tombstone", sa.Column("run_id", sa.String(32), primary_key=True))
    op.create_table(
        "lease",
        sa.Column("work", sa.String(64), primary_key=True),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("until", sa.Float(53), nullable=False),
    )
