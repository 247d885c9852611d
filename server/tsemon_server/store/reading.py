"""Reading runs, frames and alerts in one transaction."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    or_,
    select,
)

from tsemon.errors import UnknownAlert, UnknownAttempt, UnknownRun
from tsemon.wire import AlertState, Frame
from tsemon_server.store import schema, silences, versions
from tsemon_server.store.cells import Ints
from tsemon_server.store.engine import num_items
from tsemon_server.store.exporting import Export
from tsemon_server.store.listing import (
    OPEN,
    Place,
    RunFilter,
    RunOrder,
    condition,
    fired_to_the_end,
    num_runs,
    open_alerts,
    page_of,
    run_ids,
    tags,
)
from tsemon_server.store.live import (
    Backlog,
    FiringAlert,
    Layouts,
    LiveRuns,
    backlog,
    firing_alerts,
    live_runs,
    settled_values,
)
from tsemon_server.store.liveness import RunningRun, Watched, running_runs, watched_runs
from tsemon_server.store.metric import MetricReader, slot_of
from tsemon_server.store.moments import seconds_at
from tsemon_server.store.nearest import At, nearest_frame
from tsemon_server.store.newest import FramesSeen, Layers, frames_seen, newest_layers
from tsemon_server.store.packing import Kind, unpack
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.records import Alert, Attempt, Latest, Recorded, RuleVersion, Run, RunDetail, Silence, TagUse
from tsemon_server.store.remembering import RuleState, rule_state
from tsemon_server.store.replaying import PastFrame, Replay
from tsemon_server.store.retention import Retention, retentions
from tsemon_server.store.settling import layouts_of
from tsemon_server.store.streams import Stream
from tsemon_server.store.times import utc

log = logging.getLogger(__name__)


class Reader:
    """What can be read. Every method sees the same state of the database."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        # To the microsecond, as records show it: a cursor that was made from a record finds its place again.
        self._now = utc(now).timestamp()

    def ping(self) -> None:
        """Raise StoreError unless the database answers."""
        self._connection.execute(select(schema.run.c.run_id).limit(1)).all()

    # Runs

    def run(self, run_id: str) -> Run:
        """The run as lists show it, or UnknownRun."""
        return Run.model_validate(_run_fields(self._run_row(run_id)))

    def run_id(self, project: str, run: str) -> str | None:
        """The id of the run of this name, or None."""
        c = schema.run.c
        query = select(c.run_id).where(c.project == project, c.run == run)
        return self._connection.execute(query).scalar_one_or_none()

    def run_detail(self, run_id: str) -> RunDetail:
        """The run with all but its frames, or UnknownRun."""
        row, recorded = self._run_row(run_id), self.recorded(run_id)
        c = schema.attempt.c
        attempts = self._connection.execute(
            select(c.attempt, c.resume_step, c.started_at).where(c.run_id == run_id).order_by(c.attempt)
        )
        return RunDetail(
            **_run_fields(row),
            blocks=row.blocks,
            frozen_blocks=row.frozen_blocks,
            not_measured=_not_measured([told["why"] for told in row.not_measured.values()], recorded),
            config=row.config,
            attempts=[
                Attempt(attempt=a.attempt, resume_step=a.resume_step, started_at=utc(a.started_at)) for a in attempts
            ],
            metrics=recorded,
            latest=self._latest(row),
        )

    def runs(self, which: RunFilter, *, order: RunOrder, limit: int, after: Place | None = None) -> list[Run]:
        """At most `limit` runs in `order`, from `after` on."""
        # In two steps, so that alerts are counted of those alone that are shown.
        ids = run_ids(self._connection, which, order, limit, after)
        rows = {row.run_id: row for row in self._connection.execute(_runs().where(schema.run.c.run_id.in_(ids)))}
        return [Run.model_validate(_run_fields(rows[run_id])) for run_id in ids]

    def num_runs(self, which: RunFilter, most: int) -> int:
        """How many such runs there are; they are counted up to `most`."""
        return num_runs(self._connection, which, most)

    def tags(self, project: str | None, most: int) -> list[TagUse]:
        """The tags that the most runs have, of one project or of all."""
        return tags(self._connection, project, most)

    def _run_row(self, run_id: str) -> Row[Any]:
        query = (
            _runs()
            .add_columns(schema.run.c.config, schema.attempt.c.blocks)
            .add_columns(schema.attempt.c.frozen_blocks, schema.attempt.c.not_measured)
            .where(schema.run.c.run_id == run_id)
        )
        row = self._connection.execute(query).one_or_none()
        if row is None:
            raise UnknownRun(f"no run has the id {run_id!r}; the list of runs has those there are")
        return row

    # Frames

    def num_blocks(self, run_id: str, attempt: int) -> int:
        """How deep the model of this attempt is."""
        blocks = self._connection.execute(_BLOCKS, {"run_id": run_id, "attempt": attempt}).scalar_one_or_none()
        if blocks is None:
            current = self._run_row(run_id).attempt
            raise UnknownAttempt(
                f"the run {run_id} has no attempt {attempt}, its attempts are 1 to {current}; "
                "to register the run again begins another"
            )
        return len(blocks)

    def frozen_blocks(self, run_id: str, attempt: int) -> tuple[int, ...]:
        """Indexes of the blocks that this attempt leaves as they are, on purpose. That never changes."""
        (frozen,) = _FROZEN_BLOCKS.run(self._connection, {"run_id": run_id, "attempt": attempt}).fetchone()
        return tuple(json.loads(frozen))

    def recorded(self, run_id: str) -> Recorded:
        """The metrics that the run has frames for."""
        kind, metric = schema.layout.c.kind, schema.layout.c.metric
        rows = self._connection.execute(
            select(kind, metric, func.max(schema.layout.c.num_rows), func.max(schema.layout.c.num_columns))
            .where(schema.layout.c.run_id == run_id)
            .group_by(kind, metric)
            .order_by(kind, metric)
        ).all()
        return Recorded(
            scalars=[name for kind, name, *_ in rows if kind == "scalars"],
            layers={name: num_rows for kind, name, num_rows, _ in rows if kind == "layers"},
            heads={name: (num_rows, num_heads) for kind, name, num_rows, num_heads in rows if kind == "heads"},
        )

    def num_layers(self, run_id: str, kind: Kind, metric: str, attempt: int) -> int:
        """How many layers this attempt has recorded of the metric; 0 where it has recorded none of it."""
        chunk, frame, layout = schema.chunk.c, schema.frame, schema.layout
        is_settled = (chunk.run_id == run_id, chunk.kind == kind, chunk.metric == metric, chunk.attempt == attempt)
        hot = (
            select(func.max(layout.c.num_rows))
            .join(frame, slot_of(layout.c, frame.c, kind, metric))
            .where(frame.c.run_id == run_id, frame.c.attempt == attempt)
        )
        queries = (select(func.max(chunk.num_rows)).where(*is_settled), hot)
        return max(self._connection.execute(query).scalar_one() or 0 for query in queries)

    def metric(
        self,
        run_id: str,
        kind: Kind,
        metric: str,
        *,
        entry: tuple[int, int] | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        attempt: int | None = None,
    ) -> MetricReader:
        """What is stored of `metric` in steps `from_step` to `to_step`, both included.

        `entry` is a row (layer) and a column (head); without it all rows are read. Without `attempt` the frames are
        those that no later attempt hides.
        """
        return MetricReader(
            self._connection,
            run_id,
            kind,
            metric,
            entry=entry,
            from_step=from_step,
            to_step=to_step,
            attempt=attempt,
        )

    def export(
        self,
        run_id: str,
        *,
        metrics: Sequence[str] | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        attempt: int | None = None,
    ) -> Export:
        """All raw samples of some metrics, or of all, piece by piece."""
        return Export(self._connection, run_id, metrics, from_step, to_step, attempt)

    def frames_in_order(self, run_id: str, attempts: Sequence[int] | None = None) -> Replay:
        """All frames that no later attempt hides, or of each of `attempts` all, in the order of steps."""
        return Replay(self._connection, run_id, attempts)

    def frames_after(self, run_id: str, attempt: int, step: int) -> list[Frame]:
        """The attempt's frames after `step` in the order of steps; of one step, by writer and seq."""
        return [frame.to_wire() for frame in Replay(self._connection, run_id, [attempt], step + 1)]

    def nearest_frame(self, run_id: str, step: int | None, attempt: int | None) -> At | None:
        """Where the nearest frame to `step` is, or the newest one; of what no later attempt hides, or of `attempt`."""
        return nearest_frame(self._connection, run_id, step, attempt)

    def frames_at(self, run_id: str, at: At) -> list[PastFrame]:
        """All frames that an attempt has of a step, by writer and seq."""
        return list(Replay(self._connection, run_id, [at.attempt], at.step, at.step))

    def seconds_at(self, run_id: str, steps: Ints) -> NDArray[np.float64]:
        """Seconds from the run's first frame to each of these steps, in a straight line between frames; else NaN."""
        return seconds_at(self._connection, run_id, steps)

    def frames_seen(self, run_ids: Sequence[str]) -> dict[str, FramesSeen]:
        """Of those of these runs that are there: what changes with what their charts show."""
        return frames_seen(self._connection, run_ids)

    def newest_layers(self, run_ids: Sequence[str]) -> dict[str, list[Layers]]:
        """What these runs measured per layer at their newest step, writer by writer; of those that have a frame."""
        return newest_layers(self._connection, run_ids)

    def _latest(self, row: Row[Any]) -> Latest | None:
        if row.last_seq is None:
            return None
        c = schema.frame.c
        which = Stream(row.run_id, row.last_attempt, row.last_writer).of(schema.frame) & (c.seq == row.last_seq)
        found = self._connection.execute(select(schema.frame).where(which)).one_or_none()
        if found is None:  # later ones were hidden, and this one had settled
            return self._latest_settled(row)
        layout = layouts_of(self._connection, row.run_id, {found.layout_id})[found.layout_id]
        if not layout.is_sound(found):
            log.error("the newest frame of run %s is damaged; `tsemon admin check` lists them all", row.run_id)
            return _latest(row.last_step, found.time, {})
        return _latest(row.last_step, found.time, unpack(layout, found.blob)["scalars"])

    def _latest_settled(self, row: Row[Any]) -> Latest:
        stream = Stream(row.run_id, row.last_attempt, row.last_writer)
        time, values = settled_values(self._connection, stream, row.last_step, row.last_seq, ["scalars"])
        return _latest(row.last_step, time, values["scalars"])

    # Alerts

    def alerts(
        self,
        *,
        states: Sequence[AlertState] | None = None,
        run_id: str | None = None,
        project: str | None = None,
        rule: str | None = None,
        family: str | None = None,
        severity: str | None = None,
        is_acknowledged: bool | None = None,
        is_silenced: bool | None = None,
        at_end: bool | None = None,
        since: datetime | None = None,
        limit: int | None = None,
        after: Place | None = None,
    ) -> list[Alert]:
        """At most `limit` alerts, newest first, from `after` on; `since` is the oldest change of state."""
        alert = schema.alert.c
        wanted = (
            (alert.run_id, run_id),
            (schema.run.c.project, project),
            (alert.rule, rule),
            (alert.family, family),
            (alert.severity, severity),
            (alert.acknowledged_at.is_not(None), is_acknowledged),
            (silences.is_silenced(), is_silenced),
            (func.coalesce(fired_to_the_end(), False), at_end),
        )
        query = select_alerts().where(*(column == value for column, value in wanted if value is not None))
        if states:
            query = query.where(_SHOWN_STATE.in_(states))
        if since is not None:
            query = query.where(alert.updated_at >= since.timestamp())
        rows = self._connection.execute(page_of(query, (alert.alert_id,), True, limit, after), {"now": self._now})
        return [alert_of(row) for row in rows]

    def alert(self, alert_id: str) -> Alert:
        """The alert, or UnknownAlert."""
        query = select_alerts().where(schema.alert.c.alert_id == silences.number_of(alert_id))
        row = self._connection.execute(query, {"now": self._now}).one_or_none()
        if row is None:
            raise UnknownAlert(
                f"no alert has the id {alert_id!r}; one that was only pending goes away, and so do those of a run "
                "that is deleted"
            )
        return alert_of(row)

    def changed_since(self, since: float, run_ids: Collection[str] = ()) -> tuple[list[Run], list[Alert]]:
        """Alerts that have changed since then, and runs that were heard of or have such an alert; the last changed last.

        These runs and all of their alerts are among them, whenever they changed.
        """
        alert, run = schema.alert.c, schema.run.c
        is_changed = or_(alert.updated_at >= since, alert.run_id.in_(run_ids)) if run_ids else alert.updated_at >= since
        rows = select_alerts().where(is_changed).order_by(alert.updated_at, alert.alert_id)
        alerts = [alert_of(row) for row in self._connection.execute(rows, {"now": self._now})]
        is_new = or_(run.updated_at >= since, run.run_id.in_({*run_ids, *(alert.run_id for alert in alerts)}))
        runs = self._connection.execute(_runs().where(is_new).order_by(run.updated_at, run.run_id))
        return [Run.model_validate(_run_fields(row)) for row in runs], alerts

    def missing_runs(self, run_ids: Collection[str]) -> frozenset[str]:
        """Those of these ids that no run has."""
        c = schema.run.c.run_id
        if not run_ids:
            return frozenset()
        return frozenset(run_ids) - {*self._connection.execute(select(c).where(c.in_(run_ids))).scalars()}

    def is_muted(self, alert: Alert) -> bool:
        """Whether nobody is to be told that it fires: somebody has seen to it, or it is silenced now."""
        now = self.alert(alert.alert_id)
        return now.silenced or now.acknowledged_at is not None

    def alerts_to_tell(self, run_id: str, resolved: Sequence[int] = ()) -> list[Alert]:
        """What the writer of a run gets to hear: its open alerts, and those in `resolved`."""
        if not resolved and _HAS_OPEN_ALERTS.run(self._connection, {"run_id": run_id}).fetchone() is None:
            return []  # as nearly always
        rows = self._connection.execute(_ALERTS_TO_TELL, {"run_id": run_id, "resolved": resolved, "now": self._now})
        return [alert_of(row) for row in rows]

    def silences(self) -> list[Silence]:
        """Those that have not ended, the first to end first."""
        return silences.silences(self._connection, self._now)

    # Rules

    def rule_state(self, run_id: str) -> RuleState | None:
        """What was last kept; None for a run whose current attempt no rule has looked at."""
        return rule_state(self._connection, run_id)

    def num_rule_versions(self) -> int:
        """Of all rules; another number than before says that there are new ones."""
        return versions.num_versions(self._connection)

    def newest_rules(self) -> list[RuleVersion]:
        """The newest version of each rule, by name."""
        return versions.newest_versions(self._connection)

    def rule_versions(self, name: str) -> list[RuleVersion]:
        """All versions of a rule, the newest first; none where nobody knows it."""
        return versions.versions_of(self._connection, name)

    def version_of(self, name: str, digest: str) -> int | None:
        """The newest version of the rule that is so defined; None where there is none."""
        return versions.version_of(self._connection, name, digest)

    # Retention

    def retentions(self) -> list[Retention]:
        """Of the projects that do not keep all for ever."""
        return retentions(self._connection)

    # For the rules on the clock

    def running_runs(self, heard_since: float) -> list[RunningRun]:
        """All runs that are running and were heard of since."""
        return running_runs(self._connection, heard_since)

    def watched_runs(self, run_ids: Iterable[str]) -> list[Watched]:
        """What is remembered of those of these runs that were looked at before."""
        return watched_runs(self._connection, run_ids)

    # For /metrics

    def live_runs(self, *, running_since: float, ended_since: float, most: int, layouts: Layouts) -> LiveRuns:
        """The newest values of running runs heard of since `running_since`, of others since `ended_since`.

        `layouts` is what earlier looks found, and gets what this one finds.
        """
        since = {"running_since": running_since, "ended_since": ended_since}
        return live_runs(self._connection, **since, most=most, layouts=layouts)

    def firing_alerts(self) -> list[FiringAlert]:
        """All that fires and is not silenced; what fires more than once on a run is named once."""
        return firing_alerts(self._connection, self._now)

    def backlog(self) -> Backlog:
        """What waits to be done."""
        return backlog(self._connection)


def _runs() -> Select[Any]:
    """Runs and how deep they are, without configs and names of blocks: those may be large, and a list shows none."""
    num = select(func.count()).where(schema.alert.c.run_id == schema.run.c.run_id)
    at_end = num.where(fired_to_the_end()).scalar_subquery()
    columns = [column for column in schema.run.c if column is not schema.run.c.config]
    seen = open_alerts().label("open_alerts"), at_end.label("alerts_at_end"), condition().label("condition")
    return select(*columns, num_items(schema.attempt.c.blocks).label("num_blocks"), *seen).join(
        schema.attempt,
        and_(schema.attempt.c.run_id == schema.run.c.run_id, schema.attempt.c.attempt == schema.run.c.attempt),
    )


def _run_fields(row: Row[Any]) -> dict[str, Any]:
    fields = {name: value for name, value in row._mapping.items() if name in Run.model_fields}
    stepped_at = None if row.stepped_at is None else utc(row.stepped_at)
    times = {"created_at": utc(row.created_at), "updated_at": utc(row.updated_at), "stepped_at": stepped_at}
    loss = row.loss if row.loss is not None and np.isfinite(row.loss) else None
    return fields | times | {"loss": loss}


def _not_measured(told: Sequence[Mapping[str, str]], recorded: Recorded) -> dict[str, str]:
    """Why metrics are not measured, as the writers of an attempt told, each of those that it does not measure.

    A metric that only some of them name, and for which there are frames, is measured by the others. One that all name
    was measured before.
    """
    has_frames = {*recorded.scalars, *recorded.layers, *recorded.heads}
    reasons = {name: why for one in told for name, why in one.items()}
    return {name: why for name, why in reasons.items() if name not in has_frames or all(name in one for one in told)}


_SHOWN_STATE = case(
    (and_(schema.alert.c.state == "firing", schema.alert.c.acknowledged_at.is_not(None)), "acknowledged"),
    else_=schema.alert.c.state,
)


def select_alerts() -> Select[Any]:
    """Alerts as they are at the time `now`."""
    columns = [column for column in schema.alert.c if column is not schema.alert.c.state]
    silenced = silences.is_silenced().label("silenced")
    return select(*columns, _SHOWN_STATE.label("state"), schema.run.c.project, schema.run.c.run, silenced).join(
        schema.run, schema.run.c.run_id == schema.alert.c.run_id
    )


def alert_of(row: Row[Any]) -> Alert:
    times = ("opened_at", "updated_at", "acknowledged_at")
    shown = {name: None if (time := getattr(row, name)) is None else utc(time) for name in times}
    return Alert.model_validate({**row._mapping, **shown, "alert_id": str(row.alert_id)})


def _latest(step: int, time: float, values: Mapping[str, np.ndarray]) -> Latest:
    scalars = {name: float(value) if np.isfinite(value) else None for name, value in values.items()}
    return Latest(step=step, time=time, scalars=scalars)


# Built once, for every body of frames asks them.
_BLOCKS = select(schema.attempt.c.blocks).where(
    schema.attempt.c.run_id == bindparam("run_id"), schema.attempt.c.attempt == bindparam("attempt")
)
_FROZEN_BLOCKS = Prepared(
    select(schema.attempt.c.frozen_blocks).where(
        schema.attempt.c.run_id == bindparam("run_id"), schema.attempt.c.attempt == bindparam("attempt")
    )
)
_HAS_OPEN_ALERTS = Prepared(
    select(schema.alert.c.run_id)
    .where(schema.alert.c.run_id == bindparam("run_id"), or_(*(schema.alert.c.state == state for state in OPEN)))
    .limit(literal_column("1"))
)
_ALERTS_TO_TELL = (
    select_alerts()
    .where(
        schema.alert.c.run_id == bindparam("run_id"),
        or_(schema.alert.c.state.in_(OPEN), schema.alert.c.alert_id.in_(bindparam("resolved", expanding=True))),
    )
    .order_by(schema.alert.c.alert_id.desc())
)
