"""The state of the rules is stored at checkpoints only, and their progress for each attempt."""

import struct

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

_HEAD = struct.Struct("<BHHqqq")


def _head(state: bytes) -> tuple[int, int]:
    """The last step of a state and its number of samples; with several stacks, of the first one."""
    *_, last, num_read = _HEAD.unpack_from(state, 5 if state[:1] == b"\x02" else 0)
    return last, num_read


def upgrade() -> None:
    progress = op.create_table(
        "rule_progress",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("read_to", sa.BigInteger, nullable=False),
        sa.Column("num_read", sa.Integer, nullable=False),
        sa.Column("writers", sa.Text, nullable=False),
        sa.Column("waiting_since", sa.Float(53)),
        sa.Column("late_from", sa.BigInteger),
        sa.Column("num_late", sa.Integer, nullable=False),
        sa.Column("claimed_from", sa.BigInteger),
        sa.Column("num_skipped", sa.Integer, nullable=False),
        sa.Column("due_at", sa.Float(53)),
    )
    op.create_index("rule_progress_due", "rule_progress", ["due_at"])
    op.add_column("rule_checkpoint", sa.Column("num_read", sa.Integer, nullable=False, server_default="0"))
    checkpoint = sa.table(
        "rule_checkpoint",
        *map(sa.column, ("run_id", "attempt", "step", "num_read")),
        sa.column("state", sa.LargeBinary),
    )
    connection = op.get_bind()
    _count_steps(connection, checkpoint)
    of_attempts = connection.execute(sa.text("SELECT run_id, attempt, state FROM rule_state")).all()
    for run_id, attempt, state in of_attempts:
        try:
            step, num_read = _head(bytes(state))
        except struct.error:  # no state: the rules begin anew
            continue
        if step < 0:
            continue
        which = (checkpoint.c.run_id == run_id) & (checkpoint.c.attempt == attempt)
        connection.execute(sa.delete(checkpoint).where(which, checkpoint.c.step >= step))
        row = {"run_id": run_id, "attempt": attempt, "num_read": num_read}
        connection.execute(sa.insert(checkpoint).values(**row, step=step, state=bytes(state)))
        connection.execute(
            sa.insert(progress).values(**row, revision=0, read_to=step, writers="{}", num_late=0, num_skipped=0)
        )
    op.drop_table("rule_state")


def _count_steps(connection: sa.Connection, checkpoint: sa.TableClause) -> None:
    for run_id, attempt, step, state in connection.execute(
        sa.select(checkpoint.c.run_id, checkpoint.c.attempt, checkpoint.c.step, checkpoint.c.state)
    ).all():
        which = (checkpoint.c.run_id == run_id, checkpoint.c.attempt == attempt, checkpoint.c.step == step)
        try:
            values = {"num_read": _head(bytes(state))[1]}
        except struct.error:
            connection.execute(sa.delete(checkpoint).where(*which))
        else:
            connection.execute(sa.update(checkpoint).where(*which).values(**values))
