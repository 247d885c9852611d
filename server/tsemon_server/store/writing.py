"""Writing runs, frames and alerts in one transaction."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, delete, func, insert, select, update

from tsemon.errors import UnknownRun
from tsemon.wire import AlertState, Frame, RunState
from tsemon_server.store import schema
from tsemon_server.store.engine import insert_missing
from tsemon_server.store.packing import layout_id, pack
from tsemon_server.store.reading import Reader

_KEYS_PER_QUERY = 500  # below every engine's limit of parameters


class Registration(NamedTuple):
    """Where a writer may send its frames."""

    run_id: str
    attempt: int


class Added(NamedTuple):
    """What came of storing frames."""

    frames: list[Frame]
    """Those that were not stored before, by seq."""
    is_current: bool
    """Whether their attempt is the run's current one."""


class RuleState(NamedTuple):
    """How far the rules have read a run, and what they remember of it."""

    attempt: int
    step: int
    tracks: dict[str, Any]


class Writer(Reader):
    """What can be written. All of one transaction is stored, or nothing."""

    def __init__(self, connection: Connection, now: float) -> None:
        super().__init__(connection)
        # To the microsecond, as records show it: a cursor that was made from a record finds its place again.
        self._now = datetime.fromtimestamp(now, UTC).timestamp()

    # Runs

    def register(
        self,
        project: str,
        run: str,
        *,
        blocks: Sequence[str],
        config: Mapping[str, Any] | None,
        tags: Sequence[str] | None,
        resume_step: int | None,
        attempt_key: str | None,
    ) -> Registration:
        """Open a new attempt of (project, run); one that has `attempt_key` already is found again, unchanged.

        `config` and `tags` stay as they were where None is given.
        """
        run_id = self._run_named(project, run)
        if attempt_key is not None:
            known = self._connection.execute(
                select(schema.attempt.c.attempt).where(
                    schema.attempt.c.run_id == run_id, schema.attempt.c.attempt_key == attempt_key
                )
            ).scalar_one_or_none()
            if known is not None:
                return Registration(run_id, known)
        start_step = resume_step or 0
        attempt = self._hide_from(run_id, start_step) + 1
        self._connection.execute(
            insert(schema.attempt).values(
                run_id=run_id,
                attempt=attempt,
                attempt_key=attempt_key,
                resume_step=resume_step,
                hidden_from=schema.NEVER,
                blocks=list(blocks),
                started_at=self._now,
            )
        )
        self._end_alerts(run_id, start_step)
        self._set_run(run_id, attempt=attempt, state="running", **_given(config=config, tags=tags))
        self._find_newest(run_id)
        return Registration(run_id, attempt)

    def change_run(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        tags: Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Set what is given, and note that the run was heard of."""
        self._set_run(run_id, **_given(state=state, tags=tags, config=config))

    def delete_run(self, run_id: str) -> None:
        """Forget a run with all its frames and alerts."""
        if not self._connection.execute(delete(schema.run).where(schema.run.c.run_id == run_id)).rowcount:
            raise UnknownRun(f"no run has the id {run_id!r}; it may be deleted already")
        for table in (schema.attempt, schema.layout, schema.frame, schema.alert, schema.rule_state):
            self._connection.execute(delete(table).where(table.c.run_id == run_id))

    def _run_named(self, project: str, run: str) -> str:
        fresh = {
            "run_id": secrets.token_hex(8),
            "project": project,
            "run": run,
            "state": "running",
            "attempt": 0,
            "config": {},
            "tags": [],
            "created_at": self._now,
            "updated_at": self._now,
            "num_frames": 0,
        }
        insert_missing(self._connection, schema.run, [fresh])
        run_id: str = self._connection.execute(
            select(schema.run.c.run_id)
            .where(schema.run.c.project == project, schema.run.c.run == run)
            .with_for_update()  # for engines with several writers at a time: one at a time per run
        ).scalar_one()
        return run_id

    def _hide_from(self, run_id: str, start_step: int) -> int:
        """Hide what the attempts so far have from `start_step` on; the number of the last of them."""
        attempt = schema.attempt.c
        self._connection.execute(
            update(schema.attempt)
            .where(attempt.run_id == run_id, attempt.hidden_from > start_step)
            .values(hidden_from=start_step)
        )
        last = self._connection.execute(select(func.max(attempt.attempt)).where(attempt.run_id == run_id))
        return last.scalar_one() or 0

    def _set_run(self, run_id: str, **values: Any) -> None:
        statement = update(schema.run).where(schema.run.c.run_id == run_id).values(updated_at=self._now, **values)
        if not self._connection.execute(statement).rowcount:
            raise UnknownRun(f"no run has the id {run_id!r}; GET /api/v1/runs lists the runs there are")

    def _find_newest(self, run_id: str) -> None:
        """Look up the newest frame that is not hidden: once per attempt, frames that come later keep it up to date."""
        frame = schema.frame.c
        newest = self._connection.execute(
            select(frame.attempt, frame.writer, frame.seq, frame.step)
            .join(
                schema.attempt,
                (schema.attempt.c.run_id == frame.run_id)
                & (schema.attempt.c.attempt == frame.attempt)
                & (schema.attempt.c.hidden_from > frame.step),
            )
            .where(frame.run_id == run_id)
            .order_by(frame.step.desc(), frame.attempt.desc())
            .limit(1)
        ).one_or_none()
        losses = self.samples(run_id, "scalars", "loss", from_step=newest.step).values if newest else np.empty((0, 1))
        self._set_run(
            run_id,
            last_attempt=newest and newest.attempt,
            last_writer=newest and newest.writer,
            last_seq=newest and newest.seq,
            last_step=newest and newest.step,
            loss=float(losses[-1, 0]) if len(losses) else None,
        )

    # Frames

    def add_frames(self, run_id: str, attempt: int, writer: str, frames: Sequence[Frame]) -> Added:
        """Store the frames that are not stored yet."""
        current = self._connection.execute(
            select(schema.run.c.attempt, schema.run.c.last_attempt, schema.run.c.last_step)
            .where(schema.run.c.run_id == run_id)
            .with_for_update()
        ).one_or_none()
        if current is None:
            raise UnknownRun(f"no run has the id {run_id!r}; it may have been deleted, POST /api/v1/runs registers it")
        is_current = attempt == current.attempt
        stored = self._stored_seqs(run_id, attempt, writer, [frame.seq for frame in frames])
        new = {frame.seq: frame for frame in reversed(frames) if frame.seq not in stored}
        added = sorted(new.values(), key=lambda frame: frame.seq)
        if not added:
            self._set_run(run_id)
            return Added(added, is_current)
        self._insert_frames(run_id, attempt, writer, added)
        changes: dict[str, Any] = {"num_frames": schema.run.c.num_frames + len(added)}
        newest = max(added, key=lambda frame: (frame.step, frame.seq))
        if is_current and (current.last_step is None or newest.step >= current.last_step):
            changes |= {
                "last_attempt": attempt,
                "last_writer": writer,
                "last_seq": newest.seq,
                "last_step": newest.step,
            }
            if "loss" in newest.scalars:
                changes["loss"] = newest.scalars["loss"]
        self._set_run(run_id, **changes)
        return Added(added, is_current)

    def _stored_seqs(self, run_id: str, attempt: int, writer: str, seqs: Sequence[int]) -> set[int]:
        frame, found = schema.frame.c, set[int]()
        for start in range(0, len(seqs), _KEYS_PER_QUERY):
            found.update(
                self._connection.execute(
                    select(frame.seq).where(
                        frame.run_id == run_id,
                        frame.attempt == attempt,
                        frame.writer == writer,
                        frame.seq.in_(seqs[start : start + _KEYS_PER_QUERY]),
                    )
                ).scalars()
            )
        return found

    def _insert_frames(self, run_id: str, attempt: int, writer: str, frames: Iterable[Frame]) -> None:
        rows, layouts = [], {}
        for frame in frames:
            slots, blob = pack(frame)
            number = layout_id(slots)
            layouts[number] = slots
            rows.append(
                {
                    "run_id": run_id,
                    "attempt": attempt,
                    "writer": writer,
                    "seq": frame.seq,
                    "step": frame.step,
                    "time": frame.time,
                    "layout_id": number,
                    "blob": blob,
                }
            )
        entries = [
            {"run_id": run_id, "layout_id": number, **slot._asdict()}
            for number, slots in layouts.items()
            for slot in slots
        ]
        if entries:
            insert_missing(self._connection, schema.layout, entries)
        self._connection.execute(insert(schema.frame), rows)

    # Rules and alerts

    def rule_state(self, run_id: str) -> RuleState | None:
        c = schema.rule_state.c
        row = self._connection.execute(select(c.attempt, c.step, c.tracks).where(c.run_id == run_id)).one_or_none()
        return None if row is None else RuleState(*row)

    def keep_rule_state(self, run_id: str, state: RuleState) -> None:
        known = update(schema.rule_state).where(schema.rule_state.c.run_id == run_id).values(state._asdict())
        if not self._connection.execute(known).rowcount:
            self._connection.execute(insert(schema.rule_state).values(run_id=run_id, **state._asdict()))

    def open_alert(self, run_id: str, attempt: int, rule: str, **values: Any) -> None:
        """Add an alert; `values` are the other columns."""
        self._connection.execute(
            insert(schema.alert).values(
                run_id=run_id, attempt=attempt, rule=rule, opened_at=self._now, updated_at=self._now, **values
            )
        )

    def change_alert(self, run_id: str, rule: str, from_state: AlertState, **values: Any) -> int | None:
        """Change the alert of the rule that is in `from_state`; its id, or None where there is none."""
        c = schema.alert.c
        which = select(func.max(c.alert_id)).where(c.run_id == run_id, c.rule == rule, c.state == from_state)
        alert_id: int | None = self._connection.execute(which).scalar_one()
        if alert_id is not None:
            changed = update(schema.alert).where(c.alert_id == alert_id)
            self._connection.execute(changed.values(updated_at=self._now, **values))
        return alert_id

    def withdraw_alert(self, run_id: str, rule: str) -> None:
        """Forget the rule's pending alert."""
        c = schema.alert.c
        self._connection.execute(delete(schema.alert).where(c.run_id == run_id, c.rule == rule, c.state == "pending"))

    def _end_alerts(self, run_id: str, step: int) -> None:
        """A new attempt starts at `step` with a clean slate: what fires is over, what was pending never was."""
        c = schema.alert.c
        self._connection.execute(delete(schema.alert).where(c.run_id == run_id, c.state == "pending"))
        self._connection.execute(
            update(schema.alert)
            .where(c.run_id == run_id, c.state == "firing")
            .values(state="resolved", resolved_step=step, updated_at=self._now)
        )
        self._connection.execute(delete(schema.rule_state).where(schema.rule_state.c.run_id == run_id))


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
