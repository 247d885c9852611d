"""Writing runs, frames and alerts in one transaction."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Row,
    ScalarSelect,
    and_,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from tsemon.errors import InvalidArgument, LimitReached, UnknownRun, WrongAlertState
from tsemon.wire import MAX_ATTEMPTS, AlertState, Frame, RunState
from tsemon_server.store.engine import Unit, insert_missing
from tsemon_server.store.ledger import tables
from tsemon_server.store.ledger.listing import OPEN
from tsemon_server.store.ledger.liveness import Watched, keep_watched
from tsemon_server.store.ledger.notices import queue_notices
from tsemon_server.store.ledger.purging import forget_run
from tsemon_server.store.ledger.remembering import (
    RuleCheckpoint,
    RuleState,
    forget,
    keep_rule_checkpoint,
    keep_rule_state,
    rule_checkpoints,
)
from tsemon_server.store.ledger.retention import Retention
from tsemon_server.store.ledger.silences import add_silence, number_of, remove_silence
from tsemon_server.store.ledger.summaries import Summaries, columns_of
from tsemon_server.store.ledger.versions import Definition, Origin, add_versions
from tsemon_server.store.reading import Reader, alert_of, select_alerts
from tsemon_server.store.records import Alert, ResolvedReason, Silence
from tsemon_server.store.schema import NEVER
from tsemon_server.store.series import Series
from tsemon_server.store.streams import Stream
from tsemon_server.store.times import utc


class Registration(NamedTuple):
    """Where a writer may send its frames."""

    run_id: str
    attempt: int


class Added(NamedTuple):
    """What came of storing frames."""

    frames: Sequence[Frame]
    """Those that were not stored before, by seq."""
    unread: Sequence[Frame]
    """Those that the rules have to read: the same, and more where the ledger had missed some."""
    is_current: bool
    """Whether their attempt is the run's current one."""


class Event(NamedTuple):
    """Something that the log is to tell once it is committed."""

    request: Context
    """In which it happened."""
    what: str
    fields: dict[str, Any]


class TakenBack(NamedTuple):
    """An alert that is judged again."""

    alert_id: int
    pending_step: int
    firing_step: int | None
    resolved_step: int | None
    is_of_rules: bool
    """Otherwise people or the run's end called it over, and it stays as it is."""

    def meets(self, first_step: int, last_step: int | None) -> bool:
        """Whether there is a step at which both were, this alert and what held from `first_step` to `last_step`."""
        is_before = self.resolved_step is not None and self.resolved_step < first_step
        return not is_before and (last_step is None or self.pending_step <= last_step)


class Writer(Reader):
    """What can be written. All of one transaction is stored, or nothing."""

    def __init__(
        self,
        unit: Unit,
        now: float,
        series: Series[Unit],
        max_runs: int = 100_000,
        max_project_runs: int = 20_000,
    ) -> None:
        super().__init__(unit, now, series)
        self._max_runs, self._max_project_runs = max_runs, max_project_runs
        self._run_events: list[Event] = []
        self._changed_alerts: dict[int, Context] = {}

    def happened(self) -> list[Event]:
        """What is to be told of this transaction: what runs did, and what the alerts are now that changed."""
        if not self._changed_alerts:
            return self._run_events
        query = select_alerts().where(tables.alert.c.alert_id.in_(self._changed_alerts))
        rows = self._connection.execute(query.order_by(tables.alert.c.alert_id), {"now": self._now}).all()
        return [*self._run_events, *(_alert_event(row, self._changed_alerts[row.alert_id]) for row in rows)]

    def _tell(self, what: str, run_id: str, **fields: Any) -> None:
        self._run_events.append(Event(copy_context(), what, {"run_id": run_id, **fields}))

    # Runs

    def register(
        self,
        project: str,
        run: str,
        *,
        blocks: Sequence[str],
        frozen_blocks: Sequence[int] = (),
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
                select(tables.attempt.c.attempt).where(
                    tables.attempt.c.run_id == run_id, tables.attempt.c.attempt_key == attempt_key
                )
            ).scalar_one_or_none()
            if known is not None:
                return Registration(run_id, known)
        start_step = resume_step or 0
        attempt = self._hide_from(run_id, start_step) + 1
        if attempt > MAX_ATTEMPTS:
            raise LimitReached(f"the run {run!r} has {MAX_ATTEMPTS} attempts, no more are taken; begin another run")
        self._connection.execute(
            insert(tables.attempt).values(
                run_id=run_id,
                attempt=attempt,
                attempt_key=attempt_key,
                resume_step=resume_step,
                hidden_from=NEVER,
                blocks=list(blocks),
                frozen_blocks=list(frozen_blocks),
                started_at=self._now,
            )
        )
        self._end_alerts(run_id, start_step, "new attempt")
        forget(self._connection, run_id)
        process = {"process_step": None, "stepped_at": None}  # the new one has not been heard of
        self._set_run(run_id, attempt=attempt, state="running", **process, **_given(config=config, tags=tags))
        self._find_newest(run_id)
        self._tell("run registered", run_id, project=project, run=run, attempt=attempt, resume_step=resume_step)
        return Registration(run_id, attempt)

    def change_run(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        tags: Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Set what is given, and note that the run was heard of. What fires is over with the run, until it goes on."""
        self._set_run(run_id, **_given(state=state, tags=tags, config=config))
        self._tell("run changed", run_id, state=state)
        if state == "running":
            self._reopen_alerts(run_id)
        elif state is not None:
            self._end_alerts(run_id, self._last_step(run_id), "run ended")

    def hear_of(self, run_id: str, attempt: int, step: int) -> None:
        """Note that the run's process is alive, and at which step. That of an older attempt says nothing of the run."""
        Summaries(self._connection, self._now).hear_of(run_id, attempt, step)

    def delete_run(self, run_id: str) -> None:
        """Forget a run with all its frames and alerts; `Store.purge` removes the frames."""
        if not forget_run(self._connection, run_id):
            raise UnknownRun(f"no run has the id {run_id!r}; it may be deleted already")
        self._tell("run deleted", run_id)

    # Retention

    def keep_for(self, retention: Retention) -> None:
        """From now on, keep for so long what its project has."""
        self._connection.execute(delete(tables.retention).where(tables.retention.c.project == retention.project))
        self._connection.execute(insert(tables.retention).values(**retention._asdict()))

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
        # For engines with several writers at a time: one at a time per run.
        named = select(tables.run.c.run_id).where(tables.run.c.project == project, tables.run.c.run == run)
        run_id: str | None = None
        while run_id is None:  # deleted between the two
            insert_missing(self._connection, tables.run, [fresh])
            run_id = self._connection.execute(named.with_for_update()).scalar_one_or_none()
        if run_id == fresh["run_id"]:
            self._check_number_of_runs(project)
        return run_id

    def _check_number_of_runs(self, project: str) -> None:
        of_project = select(func.count()).select_from(tables.run).where(tables.run.c.project == project)
        if self._connection.execute(of_project).scalar_one() > self._max_project_runs:
            raise LimitReached(
                f"the project {project!r} has {self._max_project_runs} runs, no more are taken; delete some, let "
                "`tsemon admin retention` do so, or raise TSEMON_LIMIT_PROJECT_RUNS"
            )
        num_runs = self._connection.execute(select(func.count()).select_from(tables.run)).scalar_one()
        if num_runs > self._max_runs:
            raise LimitReached(
                f"the database holds {self._max_runs} runs, no more are taken; delete some, let `tsemon admin retention` do "
                "so, or raise TSEMON_LIMIT_RUNS"
            )

    def _hide_from(self, run_id: str, start_step: int) -> int:
        """Hide what the attempts so far have from `start_step` on; the number of the last of them."""
        attempt = tables.attempt.c
        self._connection.execute(
            update(tables.attempt)
            .where(attempt.run_id == run_id, attempt.hidden_from > start_step)
            .values(hidden_from=start_step)
        )
        last = self._connection.execute(select(func.max(attempt.attempt)).where(attempt.run_id == run_id))
        return last.scalar_one() or 0

    def _set_run(self, run_id: str, **values: Any) -> None:
        statement = update(tables.run).where(tables.run.c.run_id == run_id).values(updated_at=self._now, **values)
        if not self._connection.execute(statement).rowcount:
            raise UnknownRun(f"no run has the id {run_id!r}; the list of runs has those there are")

    def _find_newest(self, run_id: str) -> None:
        """Look up the newest frame that is not hidden: once per attempt, frames that come later keep it up to date."""
        newest = self._series.newest(self._unit, run_id, self._visible(run_id))
        self._set_run(run_id, **columns_of(newest))

    # Frames

    def add_frames(self, run_id: str, attempt: int, writer: str, frames: Sequence[Frame]) -> Added:
        """Store the frames that are not stored yet."""
        summaries, stream = Summaries(self._connection, self._now), Stream(run_id, attempt, writer)
        known = summaries.of(run_id, attempt)
        added, num_stored = self._series.add(self._unit, stream, frames)
        unread: Sequence[Frame] = added
        if num_stored <= known.num_frames + len(added):
            summaries.note(stream, known, added, num_stored)
        else:  # of some that were stored before, the ledger was not told
            newest = self._series.newest(self._unit, run_id, self._visible(run_id))
            summaries.repair(run_id, known, newest, num_stored)
            unread = self._unread(run_id, attempt)
        summaries.note_not_measured(stream, frames)
        return Added(added, unread, attempt == known.attempt)

    def _unread(self, run_id: str, attempt: int) -> list[Frame]:
        """All from the older of two checkpoints on. So far back the rules go for a late frame, too."""
        steps = [checkpoint.step for checkpoint in self.rule_checkpoints(run_id, attempt)]
        return self.frames_after(run_id, attempt, min(steps) if len(steps) > 1 else -1)

    # What the rules remember

    def keep_rule_state(self, run_id: str, attempt: int, state: bytes) -> None:
        """Replace what the rules remember of the run."""
        keep_rule_state(self._connection, run_id, RuleState(attempt, state))

    def rule_checkpoints(self, run_id: str, attempt: int) -> list[RuleCheckpoint]:
        """What was kept of earlier states, the newest first."""
        return rule_checkpoints(self._connection, run_id, attempt)

    def keep_rule_checkpoint(self, run_id: str, attempt: int, step: int, state: bytes) -> None:
        """Keep this state and the newest before it; those of other attempts and of this step on are forgotten."""
        keep_rule_checkpoint(self._connection, run_id, attempt, RuleCheckpoint(step, state))

    # Rules

    def add_rule_versions(self, definitions: Sequence[Definition], origin: Origin, *, enabled: bool = True) -> None:
        """Let each of them be the newest of its rule."""
        add_versions(self._connection, self._now, definitions, origin, enabled)

    # Alerts

    def is_running(self, run_id: str, attempt: int) -> bool:
        """Whether the run is still running, in this attempt; it stays so to the end of this transaction."""
        c = tables.run.c
        query = select(c.run_id).where(c.run_id == run_id, c.attempt == attempt, c.state == "running")
        return self._connection.execute(query.with_for_update()).first() is not None

    def keep_watched(self, watched: Iterable[Watched]) -> None:
        """Remember this of runs, in place of what was."""
        keep_watched(self._connection, watched)

    def open_alert(self, run_id: str, attempt: int, rule: str, **values: Any) -> None:
        """Add an alert; `values` are the other columns."""
        c = tables.alert.c
        opened = insert(tables.alert).values(
            run_id=run_id, attempt=attempt, rule=rule, opened_at=self._now, updated_at=self._now, **values
        )
        alert_id = self._connection.execute(opened.returning(c.alert_id)).scalar_one()
        if values["state"] == "firing":
            self._queue_notices(c.alert_id == alert_id, has_fired=True)

    def change_alert(self, run_id: str, rule: str, from_state: AlertState, **values: Any) -> int | None:
        """Change the alert of the rule that is in `from_state`; its id, or None where there is none."""
        c = tables.alert.c
        which = select(func.max(c.alert_id)).where(c.run_id == run_id, c.rule == rule, c.state == from_state)
        alert_id: int | None = self._connection.execute(which).scalar_one()
        if alert_id is not None:
            reason = {"resolved_reason": "clear"} if values.get("state") == "resolved" else {}
            changed = update(tables.alert).where(c.alert_id == alert_id)
            self._connection.execute(changed.values(updated_at=self._now, **reason, **values))
            self._queue_notices(c.alert_id == alert_id, has_fired=values.get("state") == "firing")
        return alert_id

    def _queue_notices(self, which: ColumnElement[bool], *, has_fired: bool = False) -> None:
        """Note that these alerts change, for whoever is to hear of it: part of all that changes whether one fires."""
        for alert_id in queue_notices(self._connection, self._now, which, has_fired=has_fired):
            self._changed_alerts[alert_id] = copy_context()

    def take_back_alerts(
        self, run_id: str, attempt: int, step: int, rules: Sequence[str]
    ) -> dict[str, list[TakenBack]]:
        """Let the alerts of `rules` be as they left them after `step`; those that opened or fired later, in order, by rule.

        These are neither open nor over until `revise_alert` or `drop_alert` says what they are. What people or the run's
        end called over later stays so, and is listed too.
        """
        c = tables.alert.c
        is_of_rules = func.coalesce(c.resolved_reason, "clear") == "clear"
        began_later = or_(c.pending_step > step, c.firing_step > step)
        listed = case((is_of_rules, began_later), else_=c.resolved_step > step)
        mine = and_(c.run_id == run_id, c.attempt == attempt, c.rule.in_(rules))
        rows = self._connection.execute(
            select(c.rule, c.alert_id, c.pending_step, c.firing_step, c.resolved_step, is_of_rules.label("is_of_rules"))
            .where(mine, listed)
            .order_by(c.alert_id)
        )
        later: dict[str, list[TakenBack]] = {}
        for rule, *row in rows.all():
            later.setdefault(rule, []).append(TakenBack(*row))
        mine = and_(mine, is_of_rules)
        self._queue_notices(and_(mine, or_(began_later, c.resolved_step > step)))
        self._connection.execute(update(tables.alert).where(mine, began_later).values(state="revised"))
        again = {"state": "firing", "resolved_step": None, "resolved_reason": None}
        is_over = and_(c.state != "revised", c.resolved_step > step)
        self._connection.execute(update(tables.alert).where(mine, is_over).values(**again))
        return later

    def revise_alert(self, alert_id: int, **values: Any) -> None:
        """Let an alert that was taken back be what `values` say."""
        is_it = self._taken_back(alert_id)
        if values["state"] == "firing":
            self._queue_notices(is_it, has_fired=True)
        over = {"resolved_step": None, "resolved_reason": None}
        changed = update(tables.alert).where(is_it)
        self._connection.execute(changed.values(updated_at=self._now, **over, **values))

    def drop_alert(self, alert_id: int) -> bool:
        """Remove an alert that was taken back, or, where it had fired and people were told, call it over: whether so."""
        c, is_it = tables.alert.c, self._taken_back(alert_id)
        self._connection.execute(delete(tables.alert).where(is_it, c.firing_step.is_(None)))
        over = {"state": "resolved", "resolved_step": c.firing_step, "resolved_reason": "clear"}
        changed = update(tables.alert).where(is_it).values(updated_at=self._now, **over)
        return self._connection.execute(changed).rowcount > 0

    def _taken_back(self, alert_id: int) -> ColumnElement[bool]:
        """That one, but where people or the run's end called it over."""
        return and_(tables.alert.c.alert_id == alert_id, tables.alert.c.state == "revised")

    def end_alerts_of_ended(self, run_id: str, attempt: int) -> None:
        """Where the run has ended already, what frames that came afterwards opened is over with it."""
        if not self.is_running(run_id, attempt):
            self._end_alerts(run_id, self._last_step(run_id), "run ended")

    def withdraw_alert(self, run_id: str, rule: str) -> None:
        """Forget the rule's pending alert."""
        c = tables.alert.c
        self._connection.execute(delete(tables.alert).where(c.run_id == run_id, c.rule == rule, c.state == "pending"))

    def acknowledge(self, alert_id: str, by: str, note: str | None) -> Alert:
        """Note who has seen to an alert. The first to say so stays."""
        c = tables.alert.c
        seen = {"acknowledged_at": self._now, "acknowledged_by": by, "note": note}
        self._change_open(alert_id, c.acknowledged_at.is_(None), **seen)
        return self._open_alert(alert_id, "acknowledged")

    def unacknowledge(self, alert_id: str) -> Alert:
        """Let nobody have seen to it."""
        unseen = {"acknowledged_at": None, "acknowledged_by": None, "note": None}
        self._change_open(alert_id, tables.alert.c.acknowledged_at.is_not(None), **unseen)
        return self._open_alert(alert_id, "given back")

    def resolve(self, alert_id: str, by: str, note: str | None) -> Alert:
        """Call an alert over that fires. Its rule opens another one only after its condition was over for a while."""
        found = self._open_alert(alert_id, "resolved")
        if found.firing_step is None:
            raise WrongAlertState(f"the alert {alert_id} is only pending; it goes away by itself, or fires")
        over = {"state": "resolved", **_over(self._last_step(found.run_id), "by hand")}
        seen = {"acknowledged_at": self._now, "acknowledged_by": by, "note": note}
        self._change_open(alert_id, tables.alert.c.state == "firing", **over, **seen)
        return self.alert(alert_id)

    def _change_open(self, alert_id: str, where: ColumnElement[bool], **values: Any) -> None:
        c = tables.alert.c
        is_it = and_(c.alert_id == number_of(alert_id), c.state.in_(OPEN), where)
        self._queue_notices(is_it)
        self._connection.execute(update(tables.alert).where(is_it).values(updated_at=self._now, **values))

    def _open_alert(self, alert_id: str, what: str) -> Alert:
        found = self.alert(alert_id)
        if found.state == "resolved":
            raise WrongAlertState(f"the alert {alert_id} is over, so it cannot be {what}; leave it as it is")
        return found

    def _end_alerts(self, run_id: str, step: int, reason: ResolvedReason) -> None:
        """Whatever is open ends at `step`: what fires is over, what was pending never was."""
        c = tables.alert.c
        self._connection.execute(delete(tables.alert).where(c.run_id == run_id, c.state == "pending"))
        self._queue_notices(and_(c.run_id == run_id, c.state == "firing"))
        self._connection.execute(
            update(tables.alert)
            .where(c.run_id == run_id, c.state == "firing")
            .values(state="resolved", updated_at=self._now, **_over(step, reason))
        )

    def end_alerts_of_rule(self, rule: str) -> None:
        """The rule looks at no run any more, so what it had opened is over."""
        c = tables.alert.c
        self._connection.execute(delete(tables.alert).where(c.rule == rule, c.state == "pending"))
        self._queue_notices(and_(c.rule == rule, c.state == "firing"))
        last_step = select(tables.run.c.last_step).where(tables.run.c.run_id == c.run_id).scalar_subquery()
        self._connection.execute(
            update(tables.alert)
            .where(c.rule == rule, c.state == "firing")
            .values(state="resolved", updated_at=self._now, **_over(last_step, "rule disabled"))
        )

    def _reopen_alerts(self, run_id: str) -> None:
        """The run has not ended after all, so what fired at its end still does."""
        c, of_attempt = tables.alert.c, self._run_row(run_id).attempt
        did_end = and_(c.run_id == run_id, c.resolved_reason == "run ended", c.attempt == of_attempt)
        self._queue_notices(did_end)
        again = {"state": "firing", "resolved_step": None, "resolved_reason": None}
        self._connection.execute(update(tables.alert).where(did_end).values(updated_at=self._now, **again))

    def _last_step(self, run_id: str) -> int:
        return self._run_row(run_id).last_step or 0

    # Silences

    def add_silence(self, **values: Any) -> Silence:
        """Tell nobody of the alerts that fit; `values` are the fields of the record that somebody chooses."""
        if values["until"] <= self._now:
            now, until = (utc(seconds).isoformat() for seconds in (self._now, values["until"]))
            raise InvalidArgument(f"expected `until` later than now, which is {now} here, got {until}")
        added = add_silence(self._connection, self._now, **values)
        return next(silence for silence in self.silences() if silence.silence_id == added)

    def remove_silence(self, silence_id: str) -> None:
        """Let it end now."""
        remove_silence(self._connection, silence_id)


def _over(step: int | ScalarSelect[Any], reason: ResolvedReason) -> dict[str, Any]:
    """What is noted of alerts that end at `step` though they fire."""
    fired = tables.alert.c.firing_step
    # Not before it fired: it was there, even if its frames are hidden now.
    return {"resolved_step": case((fired < step, step), else_=fired), "resolved_reason": reason}


def _alert_event(row: Row[Any], request: Context) -> Event:
    """What an alert is now."""
    alert = alert_of(row)
    known = ("alert_id", "run_id", "project", "run", "rule", "severity", "firing_step", "resolved_step")
    reason = {"resolved_reason": alert.resolved_reason, "acknowledged_by": alert.acknowledged_by}
    return Event(request, f"alert {alert.state}", {name: getattr(alert, name) for name in known} | reason)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
