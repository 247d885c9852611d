"""The progress of the rules through the frames of each attempt, and their state at checkpoints.

A state is not stored with each body. After a restart, the rules read the frames since the last checkpoint again, which gives
the same state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, delete, func, insert, or_, select, update

from tsemon_server.store.ledger import tables
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.schema import NEVER

MOST_PAUSE_S = 60.0
"""Maximum time until frames that wait or came late are due."""
SPACING = 16
"""Steps read from one checkpoint to the next, at least."""
REACH = 16_384
"""A frame that is late by up to this many samples is evaluated."""
MOST_REREAD = 4 * REACH
"""Maximum number of steps that are read again for a late frame, since the next older checkpoint may be far away."""
MOST_ERAS = 64
"""Maximum number of eras of an attempt that are kept. The oldest one then stands for those before it."""

_progress, _checkpoint, _era = tables.rule_progress.c, tables.rule_checkpoint.c, tables.rule_era.c
_COLUMNS = (
    "revision", "read_to", "num_read", "writers", "waiting_since", "late_from", "num_late", "claimed_from", "claim",
    "num_skipped", "due_at",
)  # fmt: skip


class Seen(NamedTuple):
    """What an attempt has from one of its writers."""

    step: int
    """The newest step."""
    heard_at: float
    """When a new frame of it came last."""


class Progress(NamedTuple):
    """How far the rules have read an attempt."""

    revision: int = 0
    """Another number after each reading, by which a process knows whether it remembers the last one."""
    read_to: int = -1
    """The last step that was read."""
    num_read: int = 0
    """Steps that were read."""
    writers: Mapping[str, Seen] = {}
    waiting_since: float | None = None
    """When the first of the frames came that wait for other writers to pass their step; None if none waits."""
    late_from: int | None = None
    """The first step with a frame that came after this step was read, and is not evaluated yet."""
    num_late: int = 0
    """Frames that came late and are not evaluated yet."""
    claimed_from: int | None = None
    """`late_from` before a process began to read the late frames."""
    claim: int | None = None
    """Another number for each process that begins to read them."""
    num_skipped: int = 0
    """Frames that came too late, or on which the rules failed: they are stored and were never evaluated."""
    due_at: float | None = None
    """When frames that wait, or came late, are to be read at the latest."""


class Checkpoint(NamedTuple):
    """The state of the rules when `step` was the last one that they had read."""

    step: int
    num_read: int
    state: bytes | None
    """None where nothing had been read."""


START = Checkpoint(-1, 0, None)


class RuleEra(NamedTuple):
    """From the step after this one on, until the next era, the rules of these versions read an attempt."""

    after_step: int
    versions: Mapping[str, int]


# On the path of every frame.
_OF = (_progress.run_id == bindparam("of_run"), _progress.attempt == bindparam("of_attempt"))
_READ = Prepared(select(*(_progress[name] for name in _COLUMNS)).where(*_OF))
_CHANGE = Prepared(update(tables.rule_progress).where(*_OF).values({name: bindparam(name) for name in _COLUMNS}))
_INSERT = Prepared(insert(tables.rule_progress))
_OF_CHECKPOINT = (_checkpoint.run_id == bindparam("run_id"), _checkpoint.attempt == bindparam("attempt"))
_INSERT_CHECKPOINT = Prepared(insert(tables.rule_checkpoint))
_DROP_CHECKPOINTS = Prepared(
    delete(tables.rule_checkpoint).where(
        *_OF_CHECKPOINT, _checkpoint.step.between(bindparam("first"), bindparam("last"))
    )
)
_CHECKPOINTS = Prepared(
    select(_checkpoint.step, _checkpoint.num_read).where(*_OF_CHECKPOINT).order_by(_checkpoint.step.desc())
)
_BEFORE = Prepared(
    select(_checkpoint.step, _checkpoint.num_read, _checkpoint.state)
    .where(*_OF_CHECKPOINT, _checkpoint.step < bindparam("step"))
    .order_by(_checkpoint.step.desc())
    .limit(1)
)
_ERAS = Prepared(
    select(_era.after_step, _era.versions)
    .where(_era.run_id == bindparam("run_id"), _era.attempt == bindparam("attempt"))
    .order_by(_era.number)
)
_as_json = json.JSONEncoder(separators=(",", ":")).encode


class RuleProgress:
    """The progress of all attempts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def of(self, run_id: str, attempt: int) -> Progress | None:
        """None for an attempt that no rule has looked at."""
        row = _READ.run(self._connection, {"of_run": run_id, "of_attempt": attempt}).fetchone()
        if row is None:
            return None
        found = Progress(*row)
        writers = json.loads(found.writers) if isinstance(found.writers, str) else found.writers
        return found._replace(writers={name: Seen(*seen) for name, seen in writers.items()})

    def due(self, now: float, most: int) -> list[tuple[str, int]]:
        """Attempts with frames that are to be read now."""
        is_due = or_(_progress.due_at <= now, _progress.due_at > now + MOST_PAUSE_S)  # or the clock was set back
        query = select(_progress.run_id, _progress.attempt).where(is_due).order_by(_progress.due_at)
        return [(run_id, attempt) for run_id, attempt in self._connection.execute(query.limit(most))]

    def num_skipped(self, run_ids: Sequence[str]) -> dict[str, int]:
        """Frames that were never evaluated, by run; runs without such frames are left out."""
        skipped = select(_progress.run_id, func.sum(_progress.num_skipped)).where(_progress.num_skipped > 0)
        rows = self._connection.execute(skipped.where(_progress.run_id.in_(run_ids)).group_by(_progress.run_id))
        return {run_id: int(number) for run_id, number in rows}

    def before(self, run_id: str, attempt: int, step: int) -> Checkpoint:
        """The newest checkpoint before `step`."""
        row = _BEFORE.run(self._connection, {"run_id": run_id, "attempt": attempt, "step": step}).fetchone()
        return START if row is None else Checkpoint(row[0], row[1], bytes(row[2]))

    def checkpoint_steps(self, run_id: str, attempt: int) -> list[tuple[int, int]]:
        """The steps of all checkpoints and how many steps had been read there, the newest first."""
        rows = _CHECKPOINTS.run(self._connection, {"run_id": run_id, "attempt": attempt}).fetchall()
        return [(step, num_read) for step, num_read in rows]

    def eras(self, run_id: str, attempt: int) -> list[RuleEra]:
        """The oldest first; empty for an attempt that no rule has looked at."""
        rows = _ERAS.run(self._connection, {"run_id": run_id, "attempt": attempt}).fetchall()
        return [RuleEra(step, json.loads(told) if isinstance(told, str) else told) for step, told in rows]


class RuleProgressChanges(RuleProgress):
    """Changes of it."""

    def keep(self, run_id: str, attempt: int, progress: Progress) -> None:
        """Replace the progress of the attempt."""
        row: dict[str, Any] = {**progress._asdict(), "writers": _as_json(progress.writers)}
        if not _CHANGE.run(self._connection, {"of_run": run_id, "of_attempt": attempt, **row}).rowcount:
            _INSERT.run(self._connection, {"run_id": run_id, "attempt": attempt, **row})

    def keep_checkpoint(self, run_id: str, attempt: int, kept: Checkpoint) -> None:
        """Keep this one, and of the earlier ones fewer, the older they are."""
        self.forget_checkpoints(run_id, attempt, kept.step)
        _INSERT_CHECKPOINT.run(self._connection, {"run_id": run_id, "attempt": attempt, **kept._asdict()})
        for step in _superfluous(self.checkpoint_steps(run_id, attempt)):
            self._drop(run_id, attempt, step, step)

    def forget_checkpoints(self, run_id: str, attempt: int, from_step: int) -> None:
        """Drop the checkpoints from a step on, because the rules read it again."""
        self._drop(run_id, attempt, from_step, NEVER)

    def begin_era(self, run_id: str, attempt: int, era: RuleEra) -> None:
        """Note that these rules read all later steps."""
        of_attempt = (_era.run_id == run_id, _era.attempt == attempt)
        last = self._connection.execute(select(func.max(_era.number)).where(*of_attempt)).scalar()
        number = 0 if last is None else last + 1
        self._connection.execute(delete(tables.rule_era).where(*of_attempt, _era.number <= number - MOST_ERAS))
        row = {"run_id": run_id, "attempt": attempt, "number": number, **era._asdict()}
        self._connection.execute(insert(tables.rule_era).values(row))

    def keep_newest_checkpoint(self, run_id: str, attempt: int) -> None:
        """For an attempt that has ended."""
        steps = self.checkpoint_steps(run_id, attempt)
        if steps:
            self._drop(run_id, attempt, 0, steps[0][0] - 1)

    def _drop(self, run_id: str, attempt: int, first: int, last: int) -> None:
        which = {"run_id": run_id, "attempt": attempt, "first": first, "last": last}
        _DROP_CHECKPOINTS.run(self._connection, which)


def _superfluous(steps: Sequence[tuple[int, int]]) -> Iterator[int]:
    """The checkpoints that are not the oldest of their age, where ages double. `steps` begins with the newest."""
    newest = steps[0][1]

    def size(num_read: int) -> int:
        return (max(newest - num_read, 0) // SPACING).bit_length()

    beyond = (-1, newest - 2 * MOST_REREAD)
    for (step, num_read), (_, older) in pairwise([*steps[1:], beyond]):
        if size(num_read) == size(older) or newest - num_read > MOST_REREAD:
            yield step
