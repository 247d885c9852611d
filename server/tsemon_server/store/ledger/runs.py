"""Runs: reading them for lists and pages, and changing them."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from sqlalchemy import Connection, Row, Select, and_, bindparam, func, insert, or_, select, true, update

from tsemon.errors import LimitReached, NameInUse, RunNotLive, UnknownAttempt, UnknownRun
from tsemon.stacks import Stacks
from tsemon.wire import MAX_ATTEMPTS, MAX_NAME, OnConflict, RunState
from tsemon_answers.runs import Attempt, Latest, Recorded, Run, RunDetail, RunFilter, RunOrder, TagUse, Zoom
from tsemon_answers.runs import Stack as DescribedStack
from tsemon_server.store.engine import insert_missing, items_of, num_items
from tsemon_server.store.ledger import listing, tables
from tsemon_server.store.ledger.alerts import AlertChanges
from tsemon_server.store.ledger.attempts import HEARD_S, LEASE_S, is_live, live_besides, state_of
from tsemon_server.store.ledger.journal import Journal
from tsemon_server.store.ledger.listing import Place
from tsemon_server.store.ledger.progress import RuleProgress, RuleProgressChanges
from tsemon_server.store.ledger.summaries import Known, Summaries, columns_of
from tsemon_server.store.ledger.tombstones import forget_run
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.schema import NEVER
from tsemon_server.store.streams import Address, At, Newest, Stream
from tsemon_server.store.times import utc

_run, _attempt = tables.run.c, tables.attempt.c


class Registration(NamedTuple):
    """Where a writer may send its frames."""

    run_id: str
    run: str
    attempt: int
    live_attempts: Sequence[int]
    """Other attempts of the run whose processes are alive."""


class Model(NamedTuple):
    """The properties of an attempt's model that rules use."""

    frozen: frozenset[int]
    """Indexes of the blocks that are not trained, on purpose."""
    stacks: Stacks | None
    """May be None if all blocks are one stack."""


class FramesSeen(NamedTuple):
    """The same as before: nothing that charts of a run show has changed, but for what retention drops."""

    attempt: int
    num_frames: int


class Limits(NamedTuple):
    """How many runs there may be."""

    runs: int = 100_000
    project_runs: int = 20_000


class _Names:
    """A run's name, and the names `run (2)`, `run (3)` and so on of runs that were begun while it was live."""

    def __init__(self, run: str) -> None:
        self._run, self._start = run, f"{run[: MAX_NAME - len(' (99999)')]} ("

    def __contains__(self, name: str) -> bool:
        return name == self._run or (name.startswith(self._start) and name[len(self._start) : -1].isdigit())

    def free(self, taken: Iterable[str]) -> str:
        """The first of them that is not taken."""
        others = {*taken}
        return next(name for number in itertools.count(2) if (name := f"{self._start}{number})") not in others)


class FramesOfRuns(Protocol):
    """The questions of the ledger about the frames of a run."""

    def recorded(self, run_id: str) -> Recorded:
        """The metrics that the run has frames for."""

    def newest(self, run_id: str) -> Newest | None:
        """The newest frame that no later attempt hides."""

    def scalars_of(self, frame: Address) -> tuple[float, Mapping[str, float]]:
        """The time of a frame, and its scalars."""


class Runs:
    """All runs."""

    def __init__(self, connection: Connection, now: float, frames: FramesOfRuns) -> None:
        self._connection, self._now, self._frames = connection, now, frames

    def get(self, run_id: str) -> Run:
        """The run as lists show it, or UnknownRun."""
        return Run.model_validate(_run_fields(self._row(run_id)))

    def id_of(self, project: str, run: str) -> str | None:
        """The id of the run of this name, or None."""
        query = select(_run.run_id).where(_run.project == project, _run.run == run)
        return self._connection.execute(query).scalar_one_or_none()

    def detail(self, run_id: str) -> RunDetail:
        """The run with all but its frames, or UnknownRun."""
        row, recorded = self._row(run_id), self._frames.recorded(run_id)
        attempts = self._connection.execute(
            select(_attempt.attempt, _attempt.resume_step, _attempt.started_at, _attempt.state, is_live(self._now))
            .where(_attempt.run_id == run_id)
            .order_by(_attempt.attempt)
        )
        return RunDetail(
            **_run_fields(row),
            blocks=row.blocks,
            stacks=_described(Stacks.of(len(row.blocks), row.stacks)),
            frozen_blocks=row.frozen_blocks,
            not_measured=_not_measured([told["why"] for told in row.not_measured.values()], recorded),
            config=row.config,
            quantities=row.quantities,
            attempts=[
                Attempt(attempt=number, resume_step=step, started_at=utc(started_at), state=state, is_live=live)
                for number, step, started_at, state, live in attempts
            ],
            metrics=recorded,
            latest=self._latest(row),
            unevaluated_frames=RuleProgress(self._connection).num_skipped([run_id]).get(run_id, 0),
        )

    def find(self, which: RunFilter, *, order: RunOrder, limit: int, after: Place | None = None) -> list[Run]:
        """At most `limit` runs in `order`, from `after` on."""
        # In two steps, so that alerts are counted of those alone that are shown.
        ids = listing.run_ids(self._connection, which, order, limit, after)
        rows = {row.run_id: row for row in self._connection.execute(_runs().where(_run.run_id.in_(ids)))}
        return [Run.model_validate(_run_fields(rows[run_id])) for run_id in ids]

    def count(self, which: RunFilter, most: int) -> int:
        """How many such runs there are; they are counted up to `most`."""
        return listing.num_runs(self._connection, which, most)

    def tags(self, project: str | None, most: int) -> list[TagUse]:
        """The tags that the most runs have, of one project or of all."""
        tag = items_of(_run.tags).table_valued("value")
        num_with = func.count(_run.run_id.distinct())
        query = select(tag.c.value, num_with).select_from(tables.run).join(tag, true())
        query = query.where(*listing.where(RunFilter(project=project))).group_by(tag.c.value)
        rows = self._connection.execute(query.order_by(num_with.desc(), tag.c.value).limit(most))
        return [TagUse(tag=name, runs=num_runs) for name, num_runs in rows]

    def changed_since(self, since: float, run_ids: Collection[str] = ()) -> list[Run]:
        """Runs with a sign of life since then, and the given ones; the latest last."""
        is_new = or_(_run.updated_at >= since, _run.run_id.in_(run_ids))
        rows = self._connection.execute(_runs().where(is_new).order_by(_run.updated_at, _run.run_id))
        return [Run.model_validate(_run_fields(row)) for row in rows]

    def missing(self, run_ids: Collection[str]) -> frozenset[str]:
        """Those of these ids that no run has."""
        if not run_ids:
            return frozenset()
        found = self._connection.execute(select(_run.run_id).where(_run.run_id.in_(run_ids))).scalars()
        return frozenset(run_ids) - {*found}

    def stacks(self, run_id: str, attempt: int) -> Stacks:
        """The stacks of this attempt's model."""
        found = self._connection.execute(_BLOCKS, {"run_id": run_id, "attempt": attempt}).one_or_none()
        if found is None:
            current = self._row(run_id).attempt
            raise UnknownAttempt(
                f"the run {run_id} has no attempt {attempt}, its attempts are 1 to {current}; "
                "to register the run again begins another"
            )
        return Stacks.of(len(found.blocks), found.stacks)

    def live_besides(self, run_id: str, attempt: int) -> list[int]:
        """The other attempts of the run whose processes are alive."""
        return live_besides(self._connection, run_id, attempt, self._now)

    def models_now(self, run_ids: Collection[str]) -> dict[str, Model]:
        """The models of the newest frames of these runs."""
        query = select(_run.run_id, _attempt.frozen_blocks, _attempt.stacks)
        query = query.select_from(tables.run.join(tables.attempt, OF_NEWEST_FRAME))
        rows = self._connection.execute(query.where(_run.run_id.in_(run_ids)))
        return {run_id: Model(frozenset(frozen), told and Stacks.of(0, told)) for run_id, frozen, told in rows}

    def project_of(self, run_id: str) -> str | None:
        """The project of the run, which never changes; None if there is no such run."""
        row = _PROJECT.run(self._connection, {"run_id": run_id}).fetchone()
        return None if row is None else row[0]

    def model(self, run_id: str, attempt: int) -> Model:
        """The properties of the model that rules use. They never change."""
        frozen, told, num_blocks = _MODEL.run(self._connection, {"run_id": run_id, "attempt": attempt}).fetchone()
        return Model(frozenset(json.loads(frozen)), Stacks.of(num_blocks, None if told is None else json.loads(told)))

    def frames_seen(self, run_ids: Sequence[str]) -> dict[str, FramesSeen]:
        """Of those of these runs that are there: what changes with what their charts show."""
        query = select(_run.run_id, _run.attempt, _run.num_frames).where(_run.run_id.in_(run_ids))
        rows = self._connection.execute(query)
        return {run_id: FramesSeen(attempt, num_frames) for run_id, attempt, num_frames in rows}

    def newest_steps(self, run_ids: Sequence[str]) -> dict[str, At]:
        """The places of the newest frames of these runs."""
        query = select(_run.run_id, _run.last_step, _run.last_attempt)
        rows = self._connection.execute(query.where(_run.run_id.in_(run_ids), _run.last_step.is_not(None)))
        return {run_id: At(step, attempt) for run_id, step, attempt in rows}

    def _latest(self, row: Row[Any]) -> Latest | None:
        if row.last_step is None:
            return None
        if row.latest is None:  # written by an older version
            stream = Stream(row.run_id, row.last_attempt, row.last_writer)
            time, values = self._frames.scalars_of(Address(stream, row.last_seq, row.last_step))
        else:
            time, values = row.latest["time"], row.latest["scalars"]
        scalars = {name: value if np.isfinite(value) else None for name, value in values.items()}
        return Latest(step=row.last_step, time=time, scalars=scalars)

    def _row(self, run_id: str) -> Row[Any]:
        of_attempt = _attempt.blocks, _attempt.stacks, _attempt.frozen_blocks, _attempt.not_measured
        query = _runs().add_columns(_run.config, _run.quantities, _run.latest, *of_attempt)
        row = self._connection.execute(query.where(_run.run_id == run_id)).one_or_none()
        if row is None:
            raise UnknownRun(f"no run has the id {run_id!r}; see the list of runs for the existing ones")
        return row


class RunChanges(Runs):
    """Changes of runs."""

    def __init__(
        self,
        connection: Connection,
        now: float,
        frames: FramesOfRuns,
        alerts: AlertChanges,
        progress: RuleProgressChanges,
        journal: Journal,
        limits: Limits,
    ) -> None:
        super().__init__(connection, now, frames)
        self._alerts, self._progress, self._journal, self._limits = alerts, progress, journal, limits

    def register(
        self,
        project: str,
        run: str,
        *,
        blocks: Sequence[str],
        stacks: Sequence[Mapping[str, Any]] = (),
        frozen_blocks: Sequence[int] = (),
        config: Mapping[str, Any] | None,
        tags: Sequence[str] | None,
        resume_step: int | None,
        attempt_key: str | None,
        quantities: Mapping[str, Any] | None = None,
        on_conflict: OnConflict = "take_over",
    ) -> Registration:
        """Open a new attempt of (project, run); one that has `attempt_key` already is found again, unchanged.

        `stacks` are the name and the number of blocks of each stack; none if all blocks are one stack. `config`, `tags` and
        `quantities` stay as they were where None is given. `on_conflict` is what to do if an attempt of the run is live:
        open one of another run, `run (2)`; open one of this run, too; or raise NameInUse.
        """
        names = _Names(run)
        if attempt_key is not None and (known := self._with_key(project, names, attempt_key)) is not None:
            return known
        run_id = self._run_named(project, run)
        # Another server may have opened it until this one had the lock on the run.
        if attempt_key is not None and (known := self._with_key(project, names, attempt_key)) is not None:
            return known
        live = live_besides(self._connection, run_id, 0, self._now)
        if live and on_conflict == "refuse":
            raise NameInUse(
                f"a live process sends to the run {run!r} of project {project!r} (attempt {live[-1]}); give another name, "
                'end that process, or register with on_conflict="new" or "take_over". A process that was killed counts as '
                f"live for {LEASE_S + HEARD_S:.0f} s"
            )
        if live and on_conflict == "new":
            run = names.free(self._connection.execute(select(_run.run).where(_run.project == project)).scalars())
            run_id, live = self._run_named(project, run), []
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
                state="running",
                heard_at=self._now,
                **({"stacks": list(stacks)} if stacks else {}),
            )
        )
        self.replace_silent(run_id, 1, attempt - 1)
        process = {"process_step": None, "stepped_at": None}  # the new one has not been heard of
        # Once per attempt the newest frame that is not hidden is looked for; frames that come later keep it up to date.
        newest = columns_of(self._frames.newest(run_id))
        given = _given(config=config, tags=tags, quantities=quantities)
        self._set(run_id, attempt=attempt, state="running", **process, **newest, **given)
        self._journal.tell("run registered", run_id, project=project, run=run, attempt=attempt, resume_step=resume_step)
        return Registration(run_id, run, attempt, live)

    def replace_silent(self, run_id: str, first: int, last: int) -> None:
        """Let the current attempt replace those from `first` to `last` that are silent, and end their open alerts."""
        is_earlier = _attempt.attempt.between(first, last)
        is_left = and_(_attempt.run_id == run_id, is_earlier, _attempt.state == "running")
        silent = self._connection.execute(select(_attempt.attempt).where(is_left, ~is_live(self._now))).scalars().all()
        for attempt in silent:
            self._set_attempt(run_id, attempt, "replaced")
            self._alerts.end_of_attempt(run_id, attempt, "new attempt")
            self._progress.keep_newest_checkpoint(run_id, attempt)
        if silent:
            state = self._state(run_id, self._row(run_id).attempt)
            self._connection.execute(update(tables.run).where(_run.run_id == run_id).values(state=state))

    def change(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        attempt: int | None = None,
        tags: Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Set what is given, and note that the run was heard of.

        `attempt` is the one whose `state` changes, by default the current one. Its end resolves its alerts, and `running`
        reopens them. A run is running as long as one of its attempts is live.
        """
        self._set(run_id, **_given(tags=tags, config=config))
        if state is not None:
            current = self._row(run_id).attempt
            self._change_attempt(run_id, attempt or current, state)
            self._set(run_id, state=self._state(run_id, current))
        self._journal.tell("run changed", run_id, state=state)

    def _state(self, run_id: str, current: int) -> str:
        """The state of the current attempt, or "running" as long as any attempt is live."""
        has_live = bool(live_besides(self._connection, run_id, 0, self._now))
        return "running" if has_live else state_of(self._connection, run_id, current) or "running"

    def _change_attempt(self, run_id: str, attempt: int, state: RunState) -> None:
        before = state_of(self._connection, run_id, attempt)
        if before is None:
            self.stacks(run_id, attempt)  # raises UnknownAttempt
        self._set_attempt(run_id, attempt, state, heard_at=self._now)
        if state == "running":
            self._alerts.reopen(run_id, attempt, "run ended")
        else:
            self._alerts.end_of_attempt(run_id, attempt, "run ended")

    def hear_of(self, run_id: str, attempt: int, step: int) -> Known:
        """Note that an attempt's process is alive, and at which step. Return the row of the run before."""
        known = Summaries(self._connection, self._now).hear_of(run_id, attempt, step)
        if known.state == "replaced":
            self.goes_on(run_id, attempt)
        return known

    def ask_for_zoom(self, run_id: str) -> Zoom:
        """Ask the process of the current attempt to sample more often for a while. Until it has the request, asking again
        changes nothing. Raises UnknownRun and RunNotLive."""
        self.hold(run_id)
        run = self.get(run_id)
        if run.attempt not in live_besides(self._connection, run_id, 0, self._now):
            state = state_of(self._connection, run_id, run.attempt)
            silent = f"its process has sent nothing for {LEASE_S + HEARD_S:.0f} s"
            raise RunNotLive(f"the run {run_id} cannot zoom in: {silent if state == 'running' else f'it is {state}'}")
        which = (_attempt.run_id == run_id, _attempt.attempt == run.attempt, _attempt.zoom_asked_at.is_(None))
        self._connection.execute(update(tables.attempt).where(*which).values(zoom_asked_at=self._now))
        self._journal.tell("zoom requested", run_id, attempt=run.attempt)
        return Zoom(run_id=run_id, attempt=run.attempt, after_step=run.last_step)

    def goes_on(self, run_id: str, attempt: int) -> None:
        """An attempt that was taken for dead is alive, so its alerts fire again."""
        self._alerts.reopen(run_id, attempt, "new attempt")
        self._set(run_id, state="running")

    def hold(self, run_id: str) -> bool:
        """Let others that write the run wait to the end of this transaction; False if there is no such run."""
        of_run = select(_run.run_id).where(_run.run_id == run_id)
        return self._connection.execute(of_run.with_for_update()).first() is not None

    def delete(self, run_id: str) -> None:
        """Forget a run with all its frames and alerts; `Store.purge` removes the frames."""
        if not forget_run(self._connection, run_id):
            raise UnknownRun(f"no run has the id {run_id!r}; it may be deleted already")
        self._journal.tell("run deleted", run_id)

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
        named = select(_run.run_id).where(_run.project == project, _run.run == run)
        run_id: str | None = None
        while run_id is None:  # deleted between the two
            insert_missing(self._connection, tables.run, [fresh])
            run_id = self._connection.execute(named.with_for_update()).scalar_one_or_none()
        if run_id == fresh["run_id"]:
            self._check_number_of_runs(project)
        return run_id

    def _with_key(self, project: str, names: _Names, attempt_key: str) -> Registration | None:
        """The attempt that was registered with this key, maybe under a name made of the one asked for."""
        query = select(_run.run_id, _run.run, _attempt.attempt).join(tables.attempt, _run.run_id == _attempt.run_id)
        rows = self._connection.execute(query.where(_run.project == project, _attempt.attempt_key == attempt_key))
        found = next((row for row in rows if row.run in names), None)
        if found is None:
            return None
        return Registration(*found, live_besides(self._connection, found.run_id, found.attempt, self._now))

    def _check_number_of_runs(self, project: str) -> None:
        num_runs = select(func.count()).select_from(tables.run)
        if self._connection.execute(num_runs.where(_run.project == project)).scalar_one() > self._limits.project_runs:
            raise LimitReached(
                f"the project {project!r} has {self._limits.project_runs} runs, no more are taken; delete some, let "
                "`tsemon admin retention` do so, or raise TSEMON_LIMIT_PROJECT_RUNS"
            )
        if self._connection.execute(num_runs).scalar_one() > self._limits.runs:
            raise LimitReached(
                f"the database holds {self._limits.runs} runs, no more are taken; delete some, let "
                "`tsemon admin retention` do so, or raise TSEMON_LIMIT_RUNS"
            )

    def _hide_from(self, run_id: str, start_step: int) -> int:
        """Hide what the attempts so far have from `start_step` on; the number of the last of them."""
        hidden = update(tables.attempt).where(_attempt.run_id == run_id, _attempt.hidden_from > start_step)
        self._connection.execute(hidden.values(hidden_from=start_step))
        last = self._connection.execute(select(func.max(_attempt.attempt)).where(_attempt.run_id == run_id))
        return last.scalar_one() or 0

    def _set_attempt(self, run_id: str, attempt: int, state: str, **values: Any) -> None:
        which = (_attempt.run_id == run_id, _attempt.attempt == attempt)
        self._connection.execute(update(tables.attempt).where(*which).values(state=state, **values))

    def _set(self, run_id: str, **values: Any) -> None:
        statement = update(tables.run).where(_run.run_id == run_id).values(updated_at=self._now, **values)
        if not self._connection.execute(statement).rowcount:
            raise UnknownRun(f"no run has the id {run_id!r}; see the list of runs for the existing ones")


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _runs() -> Select[Any]:
    """Runs and how deep they are, without what may be large and no list shows: configs, scalars, names of blocks."""
    num = select(func.count()).where(tables.alert.c.run_id == _run.run_id)
    at_end = num.where(listing.fired_to_the_end()).scalar_subquery()
    columns = [column for column in _run if column not in (_run.config, _run.latest)]
    open_alerts, condition = listing.open_alerts().label("open_alerts"), listing.condition().label("condition")
    seen = open_alerts, at_end.label("alerts_at_end"), condition
    return select(*columns, num_items(_attempt.blocks).label("num_blocks"), *seen).join(
        tables.attempt, and_(_attempt.run_id == _run.run_id, _attempt.attempt == _run.attempt)
    )


def _run_fields(row: Row[Any]) -> dict[str, Any]:
    fields = {name: value for name, value in row._mapping.items() if name in Run.model_fields}
    stepped_at = None if row.stepped_at is None else utc(row.stepped_at)
    times = {"created_at": utc(row.created_at), "updated_at": utc(row.updated_at), "stepped_at": stepped_at}
    loss = row.loss if row.loss is not None and np.isfinite(row.loss) else None
    return fields | times | {"loss": loss}


def _described(stacks: Stacks) -> list[DescribedStack]:
    of_blocks, of_states = stacks.spans(stacks.num_blocks), stacks.spans(stacks.num_states)
    return [
        DescribedStack(**stack._asdict(), first_block=blocks.start, first_state=states.start)
        for stack, blocks, states in zip(stacks.each, of_blocks, of_states, strict=True)
    ]


def _not_measured(told: Sequence[Mapping[str, str]], recorded: Recorded) -> dict[str, str]:
    """Why metrics are not measured, as the writers of an attempt told, each of those that it does not measure.

    A metric that only some of them name, and for which there are frames, is measured by the others. One that all name
    was measured before.
    """
    has_frames = {*recorded.scalars, *recorded.layers, *recorded.heads}
    reasons = {name: why for one in told for name, why in one.items()}
    return {name: why for name, why in reasons.items() if name not in has_frames or all(name in one for one in told)}


OF_NEWEST_FRAME = and_(_attempt.run_id == _run.run_id, _attempt.attempt == _run.last_attempt)
"""Joins a run to the attempt of its newest frame."""

# Built once, for every body of frames asks them.
_BLOCKS = select(_attempt.blocks, _attempt.stacks).where(
    _attempt.run_id == bindparam("run_id"), _attempt.attempt == bindparam("attempt")
)
_PROJECT = Prepared(select(_run.project).where(_run.run_id == bindparam("run_id")))
_MODEL = Prepared(
    select(_attempt.frozen_blocks, _attempt.stacks, num_items(_attempt.blocks)).where(
        _attempt.run_id == bindparam("run_id"), _attempt.attempt == bindparam("attempt")
    )
)
