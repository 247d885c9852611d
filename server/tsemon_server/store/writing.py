"""Writing runs, frames and alerts in one transaction."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    ScalarSelect,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    null,
    or_,
    select,
    union,
    union_all,
    update,
)

from tsemon.errors import InvalidArgument, InvalidFrame, LimitReached, UnknownRun, WrongAlertState
from tsemon.wire import MAX_ATTEMPTS, MAX_METRICS, MAX_WRITERS, AlertState, Frame, RunState
from tsemon_server.store import schema
from tsemon_server.store.engine import insert_missing
from tsemon_server.store.listing import OPEN
from tsemon_server.store.liveness import Watched, keep_watched
from tsemon_server.store.notices import queue_notices
from tsemon_server.store.packing import Layout, layout_id, pack
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.purging import forget_run
from tsemon_server.store.reading import Reader, alert_of, select_alerts
from tsemon_server.store.records import Alert, ResolvedReason, Silence
from tsemon_server.store.remembering import (
    RuleCheckpoint,
    RuleState,
    forget,
    keep_rule_checkpoint,
    keep_rule_state,
    rule_checkpoints,
)
from tsemon_server.store.retention import Retention
from tsemon_server.store.settling import PAGE_SEQS, NewestFrame, newest_settled, seqs_of_page
from tsemon_server.store.silences import add_silence, number_of, remove_silence
from tsemon_server.store.streams import Stream
from tsemon_server.store.times import utc
from tsemon_server.store.versions import Definition, Origin, add_versions

MOST_KNOWN = 100_000
"""Of each kind; then all is asked again."""

MAX_SLOTS = 200_000
"""Entries in all layouts of a run: one for each metric of each different set of metrics that its frames have."""

_PAGES_PER_QUERY = 16
"""A body that leaves out more seqs than these pages hold is looked up in pieces."""

_MOST_TELL = 64
"""Writers of an attempt that may say why they do not measure something."""

_KNOWN = Prepared(
    select(
        schema.run.c.attempt,
        schema.run.c.last_step,
        schema.run.c.loss,
        schema.run.c.process_step,
        schema.run.c.stepped_at,
        schema.attempt.c.hidden_from,
    )
    .join(schema.attempt, schema.attempt.c.run_id == schema.run.c.run_id)
    .where(schema.run.c.run_id == bindparam("run_id"), schema.attempt.c.attempt == bindparam("attempt"))
    .with_for_update(of=schema.run)
)
# In one statement, because a frame may be on its way from the one table to the other.
_STORED_SEQS = Prepared(
    union_all(
        select(schema.frame.c.seq.label("number"), null().label("seqs")).where(
            schema.frame.c.run_id == bindparam("run_id"),
            schema.frame.c.attempt == bindparam("attempt"),
            schema.frame.c.writer == bindparam("writer"),
            schema.frame.c.seq.between(bindparam("first"), bindparam("last")),
        ),
        select(schema.settled.c.page, schema.settled.c.seqs).where(
            schema.settled.c.run_id == bindparam("run_id"),
            schema.settled.c.attempt == bindparam("attempt"),
            schema.settled.c.writer == bindparam("writer"),
            schema.settled.c.page.between(bindparam("first_page"), bindparam("last_page")),
        ),
    )
)
_INSERT_FRAMES = Prepared(insert(schema.frame))
_NOTE_FRAMES = (
    update(schema.run)
    .where(schema.run.c.run_id == bindparam("which"))
    .values(
        updated_at=bindparam("now"),
        num_frames=schema.run.c.num_frames + bindparam("num_added"),
        process_step=bindparam("process_step"),
        stepped_at=bindparam("stepped_at"),
    )
)
_NOTE_NEWEST = Prepared(
    _NOTE_FRAMES.values(
        last_attempt=bindparam("last_attempt"),
        last_writer=bindparam("last_writer"),
        last_seq=bindparam("last_seq"),
        last_step=bindparam("last_step"),
        loss=bindparam("last_loss"),
    )
)
_NOTE_OLDER = Prepared(_NOTE_FRAMES)


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


class _Known(NamedTuple):
    """What is known of a run when frames come."""

    attempt: int
    last_step: int | None
    loss: float | None
    process_step: int | None
    stepped_at: float | None
    hidden_from: int
    """Where the attempt of these frames ends to be seen."""


class Known:
    """What is stored, never changes, and need not be asked of the database again."""

    def __init__(self) -> None:
        self.layouts: set[tuple[str, int]] = set()
        """Run and id."""
        self.streams: set[Stream] = set()

    def add(self, other: Known) -> None:
        for mine, new in ((self.layouts, other.layouts), (self.streams, other.streams)):
            if len(mine) >= MOST_KNOWN:
                mine.clear()
            mine.update(new)  # type: ignore[arg-type]


class Writer(Reader):
    """What can be written. All of one transaction is stored, or nothing."""

    def __init__(
        self,
        connection: Connection,
        now: float,
        known: Known | None = None,
        max_runs: int = 100_000,
        max_project_runs: int = 20_000,
    ) -> None:
        super().__init__(connection, now)
        self._known_before, self._max_runs, self._max_project_runs = known or Known(), max_runs, max_project_runs
        self.new = Known()
        """What is stored once this transaction is committed."""
        self._run_events: list[Event] = []
        self._changed_alerts: dict[int, Context] = {}

    def happened(self) -> list[Event]:
        """What is to be told of this transaction: what runs did, and what the alerts are now that changed."""
        if not self._changed_alerts:
            return self._run_events
        query = select_alerts().where(schema.alert.c.alert_id.in_(self._changed_alerts))
        rows = self._connection.execute(query.order_by(schema.alert.c.alert_id), {"now": self._now}).all()
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
                select(schema.attempt.c.attempt).where(
                    schema.attempt.c.run_id == run_id, schema.attempt.c.attempt_key == attempt_key
                )
            ).scalar_one_or_none()
            if known is not None:
                return Registration(run_id, known)
        start_step = resume_step or 0
        attempt = self._hide_from(run_id, start_step) + 1
        if attempt > MAX_ATTEMPTS:
            raise LimitReached(f"the run {run!r} has {MAX_ATTEMPTS} attempts, no more are taken; begin another run")
        self._connection.execute(
            insert(schema.attempt).values(
                run_id=run_id,
                attempt=attempt,
                attempt_key=attempt_key,
                resume_step=resume_step,
                hidden_from=schema.NEVER,
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
        known = self._known(run_id, attempt)
        if attempt == known.attempt:
            self._set_run(run_id, **self._process(known, step))

    def delete_run(self, run_id: str) -> None:
        """Forget a run with all its frames and alerts; `Store.purge` removes the frames."""
        if not forget_run(self._connection, run_id):
            raise UnknownRun(f"no run has the id {run_id!r}; it may be deleted already")
        self._tell("run deleted", run_id)

    # Retention

    def keep_for(self, retention: Retention) -> None:
        """From now on, keep for so long what its project has."""
        self._connection.execute(delete(schema.retention).where(schema.retention.c.project == retention.project))
        self._connection.execute(insert(schema.retention).values(**retention._asdict()))

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
        named = select(schema.run.c.run_id).where(schema.run.c.project == project, schema.run.c.run == run)
        run_id: str | None = None
        while run_id is None:  # deleted between the two
            insert_missing(self._connection, schema.run, [fresh])
            run_id = self._connection.execute(named.with_for_update()).scalar_one_or_none()
        if run_id == fresh["run_id"]:
            self._check_number_of_runs(project)
        return run_id

    def _check_number_of_runs(self, project: str) -> None:
        of_project = select(func.count()).select_from(schema.run).where(schema.run.c.project == project)
        if self._connection.execute(of_project).scalar_one() > self._max_project_runs:
            raise LimitReached(
                f"the project {project!r} has {self._max_project_runs} runs, no more are taken; delete some, let "
                "`tsemon admin retention` do so, or raise TSEMON_LIMIT_PROJECT_RUNS"
            )
        num_runs = self._connection.execute(select(func.count()).select_from(schema.run)).scalar_one()
        if num_runs > self._max_runs:
            raise LimitReached(
                f"the database holds {self._max_runs} runs, no more are taken; delete some, let `tsemon admin retention` do "
                "so, or raise TSEMON_LIMIT_RUNS"
            )

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
            raise UnknownRun(f"no run has the id {run_id!r}; the list of runs has those there are")

    def _find_newest(self, run_id: str) -> None:
        """Look up the newest frame that is not hidden: once per attempt, frames that come later keep it up to date."""
        newest = max((*self._newest_hot(run_id), *newest_settled(self._connection, run_id)), default=None)
        step, attempt, seq, writer = newest or (None, None, None, None)
        self._set_run(run_id, last_attempt=attempt, last_writer=writer, last_seq=seq, last_step=step)
        latest = self._latest(self._run_row(run_id))
        self._set_run(run_id, loss=None if latest is None else latest.scalars.get("loss"))

    def _newest_hot(self, run_id: str) -> list[NewestFrame]:
        frame, attempt = schema.frame.c, schema.attempt.c
        rows = self._connection.execute(
            select(frame.step, frame.attempt, frame.seq, frame.writer)
            .join(
                schema.attempt,
                (attempt.run_id == frame.run_id)
                & (attempt.attempt == frame.attempt)
                & (attempt.hidden_from > frame.step),
            )
            .where(frame.run_id == run_id)
            .order_by(frame.step.desc(), frame.attempt.desc(), frame.seq.desc(), frame.writer.desc())
            .limit(1)
        )
        return [NewestFrame(*row) for row in rows]

    # Frames

    def add_frames(self, run_id: str, attempt: int, writer: str, frames: Sequence[Frame]) -> Added:
        """Store the frames that are not stored yet."""
        known = self._known(run_id, attempt)
        stored = self._stored_seqs(run_id, attempt, writer, [frame.seq for frame in frames])
        new = {frame.seq: frame for frame in reversed(frames) if frame.seq not in stored}
        added = sorted(new.values(), key=lambda frame: frame.seq)
        if added:
            self._insert_frames(run_id, attempt, writer, added)
            self._check_number_of_writers(Stream(run_id, attempt, writer))
        reached = max((frame.step for frame in added), default=None) if attempt == known.attempt else None
        noted = {"which": run_id, "now": self._now, "num_added": len(added), **self._process(known, reached)}
        newest = max(
            (frame for frame in added if frame.step < known.hidden_from),
            key=lambda frame: (frame.step, frame.seq),
            default=None,
        )
        if newest is None or (known.last_step is not None and newest.step < known.last_step):
            _NOTE_OLDER.run(self._connection, noted)
        else:
            place = {"last_attempt": attempt, "last_writer": writer, "last_seq": newest.seq, "last_step": newest.step}
            _NOTE_NEWEST.run(self._connection, noted | place | {"last_loss": newest.scalars.get("loss", known.loss)})
        telling = [frame for frame in added if frame.not_measured is not None]
        if telling:
            self._note_not_measured(Stream(run_id, attempt, writer), telling[-1])
        return Added(added, attempt == known.attempt)

    def _note_not_measured(self, stream: Stream, frame: Frame) -> None:
        """Unless a later frame has told already. Others that write the same run wait: it is locked since `_known`."""
        c = schema.attempt.c
        which = (c.run_id == stream.run_id, c.attempt == stream.attempt)
        told = dict(self._connection.execute(select(c.not_measured).where(*which)).scalar_one())
        seq = told.get(stream.writer, {"seq": -1})["seq"]
        if frame.seq > seq and (stream.writer in told or len(told) < _MOST_TELL):
            told[stream.writer] = {"seq": frame.seq, "why": frame.not_measured}
            self._connection.execute(update(schema.attempt).where(*which).values(not_measured=told))

    def _known(self, run_id: str, attempt: int) -> _Known:
        row = _KNOWN.run(self._connection, {"run_id": run_id, "attempt": attempt}).fetchone()
        if row is None:
            raise UnknownRun(
                f"no run has the id {run_id!r}; it may have been deleted, and to register it makes it anew"
            )
        return _Known(*row)

    def _process(self, known: _Known, step: int | None) -> dict[str, Any]:
        """Where the process is, and since when: it moves with a step that is larger than those before."""
        if step is not None and (known.process_step is None or step > known.process_step):
            return {"process_step": step, "stepped_at": self._now}
        return {"process_step": known.process_step, "stepped_at": known.stepped_at}

    def _stored_seqs(self, run_id: str, attempt: int, writer: str, seqs: Sequence[int]) -> set[int]:
        stream, found = Stream(run_id, attempt, writer)._asdict(), set[int]()
        for first, last in _spans(seqs, _PAGES_PER_QUERY * PAGE_SEQS):
            span = {"first": first, "last": last, "first_page": first // PAGE_SEQS, "last_page": last // PAGE_SEQS}
            for number, settled in _STORED_SEQS.run(self._connection, stream | span):
                found.update((number,) if settled is None else seqs_of_page(number, settled))
        return found

    def _insert_frames(self, run_id: str, attempt: int, writer: str, frames: Iterable[Frame]) -> None:
        rows: list[dict[str, Any]] = []
        layouts: dict[int, Layout] = {}
        for frame in frames:
            layout, blob, crcs = pack(frame)
            number = layout_id(layout.slots)
            layouts[number] = layout
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
                    "crcs": crcs,
                }
            )
        self._insert_layouts(run_id, layouts)
        _INSERT_FRAMES.run_many(self._connection, rows)

    def _insert_layouts(self, run_id: str, layouts: Mapping[int, Layout]) -> None:
        new = [number for number in layouts if (run_id, number) not in self._known_before.layouts]
        entries = [
            {"run_id": run_id, "layout_id": number, **slot._asdict()}
            for number in new
            for slot in layouts[number].slots
        ]
        if entries:
            insert_missing(self._connection, schema.layout, entries)
            self._check_number_of_metrics(run_id)
        self.new.layouts.update((run_id, number) for number in new)

    def _check_number_of_metrics(self, run_id: str) -> None:
        """Of what is stored with these: a name that is known, or came with another frame meanwhile, is no new one."""
        of_run = select(func.count(), func.count(schema.layout.c.metric.distinct())).where(
            schema.layout.c.run_id == run_id
        )
        num_slots, num_metrics = self._connection.execute(of_run).one()
        if num_metrics > MAX_METRICS:
            raise InvalidFrame(
                f"expected metrics of at most {MAX_METRICS} different names in a run, got {num_metrics}; "
                "a name is no place for a number. Nothing of this body is stored"
            )
        if num_slots > MAX_SLOTS:
            raise InvalidFrame(
                "expected frames that mostly hold the same metrics in the same shapes, got another set once more; "
                f"together they have {num_slots} entries, at most {MAX_SLOTS} are kept. Nothing of this body is stored"
            )

    def _check_number_of_writers(self, stream: Stream) -> None:
        if stream in self._known_before.streams:
            return
        writers = [
            select(table.c.writer).where(table.c.run_id == stream.run_id, table.c.attempt == stream.attempt)
            for table in (schema.frame, schema.settled)
        ]
        num_writers = self._connection.execute(
            select(func.count()).select_from(union(*writers).subquery())
        ).scalar_one()
        if num_writers > MAX_WRITERS:
            raise LimitReached(
                f"the attempt has {MAX_WRITERS} writers, no more are taken; let one process send for others"
            )
        self.new.streams.add(stream)

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
        c = schema.run.c
        query = select(c.run_id).where(c.run_id == run_id, c.attempt == attempt, c.state == "running")
        return self._connection.execute(query.with_for_update()).first() is not None

    def keep_watched(self, watched: Iterable[Watched]) -> None:
        """Remember this of runs, in place of what was."""
        keep_watched(self._connection, watched)

    def open_alert(self, run_id: str, attempt: int, rule: str, **values: Any) -> None:
        """Add an alert; `values` are the other columns."""
        c = schema.alert.c
        opened = insert(schema.alert).values(
            run_id=run_id, attempt=attempt, rule=rule, opened_at=self._now, updated_at=self._now, **values
        )
        alert_id = self._connection.execute(opened.returning(c.alert_id)).scalar_one()
        if values["state"] == "firing":
            self._queue_notices(c.alert_id == alert_id, has_fired=True)

    def change_alert(self, run_id: str, rule: str, from_state: AlertState, **values: Any) -> int | None:
        """Change the alert of the rule that is in `from_state`; its id, or None where there is none."""
        c = schema.alert.c
        which = select(func.max(c.alert_id)).where(c.run_id == run_id, c.rule == rule, c.state == from_state)
        alert_id: int | None = self._connection.execute(which).scalar_one()
        if alert_id is not None:
            reason = {"resolved_reason": "clear"} if values.get("state") == "resolved" else {}
            changed = update(schema.alert).where(c.alert_id == alert_id)
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
        c = schema.alert.c
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
        self._connection.execute(update(schema.alert).where(mine, began_later).values(state="revised"))
        again = {"state": "firing", "resolved_step": None, "resolved_reason": None}
        is_over = and_(c.state != "revised", c.resolved_step > step)
        self._connection.execute(update(schema.alert).where(mine, is_over).values(**again))
        return later

    def revise_alert(self, alert_id: int, **values: Any) -> None:
        """Let an alert that was taken back be what `values` say."""
        is_it = self._taken_back(alert_id)
        if values["state"] == "firing":
            self._queue_notices(is_it, has_fired=True)
        over = {"resolved_step": None, "resolved_reason": None}
        changed = update(schema.alert).where(is_it)
        self._connection.execute(changed.values(updated_at=self._now, **over, **values))

    def drop_alert(self, alert_id: int) -> bool:
        """Remove an alert that was taken back, or, where it had fired and people were told, call it over: whether so."""
        c, is_it = schema.alert.c, self._taken_back(alert_id)
        self._connection.execute(delete(schema.alert).where(is_it, c.firing_step.is_(None)))
        over = {"state": "resolved", "resolved_step": c.firing_step, "resolved_reason": "clear"}
        changed = update(schema.alert).where(is_it).values(updated_at=self._now, **over)
        return self._connection.execute(changed).rowcount > 0

    def _taken_back(self, alert_id: int) -> ColumnElement[bool]:
        """That one, but where people or the run's end called it over."""
        return and_(schema.alert.c.alert_id == alert_id, schema.alert.c.state == "revised")

    def end_alerts_of_ended(self, run_id: str, attempt: int) -> None:
        """Where the run has ended already, what frames that came afterwards opened is over with it."""
        if not self.is_running(run_id, attempt):
            self._end_alerts(run_id, self._last_step(run_id), "run ended")

    def withdraw_alert(self, run_id: str, rule: str) -> None:
        """Forget the rule's pending alert."""
        c = schema.alert.c
        self._connection.execute(delete(schema.alert).where(c.run_id == run_id, c.rule == rule, c.state == "pending"))

    def acknowledge(self, alert_id: str, by: str, note: str | None) -> Alert:
        """Note who has seen to an alert. The first to say so stays."""
        c = schema.alert.c
        seen = {"acknowledged_at": self._now, "acknowledged_by": by, "note": note}
        self._change_open(alert_id, c.acknowledged_at.is_(None), **seen)
        return self._open_alert(alert_id, "acknowledged")

    def unacknowledge(self, alert_id: str) -> Alert:
        """Let nobody have seen to it."""
        unseen = {"acknowledged_at": None, "acknowledged_by": None, "note": None}
        self._change_open(alert_id, schema.alert.c.acknowledged_at.is_not(None), **unseen)
        return self._open_alert(alert_id, "given back")

    def resolve(self, alert_id: str, by: str, note: str | None) -> Alert:
        """Call an alert over that fires. Its rule opens another one only after its condition was over for a while."""
        found = self._open_alert(alert_id, "resolved")
        if found.firing_step is None:
            raise WrongAlertState(f"the alert {alert_id} is only pending; it goes away by itself, or fires")
        over = {"state": "resolved", **_over(self._last_step(found.run_id), "by hand")}
        seen = {"acknowledged_at": self._now, "acknowledged_by": by, "note": note}
        self._change_open(alert_id, schema.alert.c.state == "firing", **over, **seen)
        return self.alert(alert_id)

    def _change_open(self, alert_id: str, where: ColumnElement[bool], **values: Any) -> None:
        c = schema.alert.c
        is_it = and_(c.alert_id == number_of(alert_id), c.state.in_(OPEN), where)
        self._queue_notices(is_it)
        self._connection.execute(update(schema.alert).where(is_it).values(updated_at=self._now, **values))

    def _open_alert(self, alert_id: str, what: str) -> Alert:
        found = self.alert(alert_id)
        if found.state == "resolved":
            raise WrongAlertState(f"the alert {alert_id} is over, so it cannot be {what}; leave it as it is")
        return found

    def _end_alerts(self, run_id: str, step: int, reason: ResolvedReason) -> None:
        """Whatever is open ends at `step`: what fires is over, what was pending never was."""
        c = schema.alert.c
        self._connection.execute(delete(schema.alert).where(c.run_id == run_id, c.state == "pending"))
        self._queue_notices(and_(c.run_id == run_id, c.state == "firing"))
        self._connection.execute(
            update(schema.alert)
            .where(c.run_id == run_id, c.state == "firing")
            .values(state="resolved", updated_at=self._now, **_over(step, reason))
        )

    def end_alerts_of_rule(self, rule: str) -> None:
        """The rule looks at no run any more, so what it had opened is over."""
        c = schema.alert.c
        self._connection.execute(delete(schema.alert).where(c.rule == rule, c.state == "pending"))
        self._queue_notices(and_(c.rule == rule, c.state == "firing"))
        last_step = select(schema.run.c.last_step).where(schema.run.c.run_id == c.run_id).scalar_subquery()
        self._connection.execute(
            update(schema.alert)
            .where(c.rule == rule, c.state == "firing")
            .values(state="resolved", updated_at=self._now, **_over(last_step, "rule disabled"))
        )

    def _reopen_alerts(self, run_id: str) -> None:
        """The run has not ended after all, so what fired at its end still does."""
        c, of_attempt = schema.alert.c, self._run_row(run_id).attempt
        did_end = and_(c.run_id == run_id, c.resolved_reason == "run ended", c.attempt == of_attempt)
        self._queue_notices(did_end)
        again = {"state": "firing", "resolved_step": None, "resolved_reason": None}
        self._connection.execute(update(schema.alert).where(did_end).values(updated_at=self._now, **again))

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


def _spans(seqs: Sequence[int], most: int) -> list[tuple[int, int]]:
    """The first and the last of pieces that hold all of these and leave few out, most often one."""
    spans: list[tuple[int, int]] = []
    for seq in sorted(seqs):
        if spans and seq - spans[-1][0] < most:
            spans[-1] = spans[-1][0], seq
        else:
            spans.append((seq, seq))
    return spans


def _over(step: int | ScalarSelect[Any], reason: ResolvedReason) -> dict[str, Any]:
    """What is noted of alerts that end at `step` though they fire."""
    fired = schema.alert.c.firing_step
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
