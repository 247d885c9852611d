"""Reading runs, frames and alerts in one transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, NamedTuple

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    case,
    func,
    literal,
    literal_column,
    or_,
    select,
    tuple_,
)

from tsemon.errors import UnknownAlert, UnknownAttempt, UnknownRun
from tsemon.wire import AlertState, Frame, RunState
from tsemon_server.store import schema, silences, versions
from tsemon_server.store.chunks import DamagedChunk, unpack_samples
from tsemon_server.store.exporting import Export
from tsemon_server.store.liveness import RunningRun, Watched, running_runs, watched_runs
from tsemon_server.store.metric import MetricReader, slot_of
from tsemon_server.store.packing import Kind, Slot, item_type, unpack
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.records import Alert, Attempt, Latest, Recorded, RuleVersion, Run, RunDetail, Silence
from tsemon_server.store.remembering import RuleState, rule_state
from tsemon_server.store.replaying import Replay
from tsemon_server.store.retention import Retention, retentions
from tsemon_server.store.settling import find_settled
from tsemon_server.store.streams import Stream
from tsemon_server.store.times import utc

OPEN: tuple[AlertState, ...] = ("pending", "firing")

RunOrder = Literal["updated", "-updated", "name", "-name"]


class Place(NamedTuple):
    """A place between two entries of an ordered list: after the entry with this key."""

    key: tuple[float | str, ...]


class LiveRun(NamedTuple):
    """What /metrics shows of one run."""

    run_id: str
    project: str
    run: str
    step: int | None
    seen_at: float
    loss: float | None
    token_similarity: list[float]


class FiringAlert(NamedTuple):
    """An alert as /metrics shows it."""

    run_id: str
    rule: str
    severity: str


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

    def run_detail(self, run_id: str) -> RunDetail:
        """The run with all but its frames, or UnknownRun."""
        row = self._run_row(run_id)
        attempts = self._connection.execute(
            select(schema.attempt).where(schema.attempt.c.run_id == run_id).order_by(schema.attempt.c.attempt)
        )
        return RunDetail(
            **_run_fields(row),
            blocks=row.blocks,
            frozen_blocks=row.frozen_blocks,
            config=row.config,
            attempts=[
                Attempt(attempt=a.attempt, resume_step=a.resume_step, started_at=utc(a.started_at)) for a in attempts
            ],
            metrics=self.recorded(run_id),
            latest=self._latest(row),
        )

    def runs(
        self,
        *,
        project: str | None,
        run: str | None,
        state: RunState | None,
        order: RunOrder,
        limit: int,
        after: Place | None,
    ) -> list[Run]:
        """At most `limit` runs in `order`, from `after` on."""
        query = _runs()
        wanted = ((schema.run.c.project, project), (schema.run.c.run, run), (schema.run.c.state, state))
        query = query.where(*(column == value for column, value in wanted if value is not None))
        keys: tuple[ColumnElement[Any], ...] = (schema.run.c.updated_at, schema.run.c.run_id)
        if order.endswith("name"):
            keys = (schema.run.c.run, schema.run.c.project)
        rows = self._connection.execute(page_of(query, keys, order.startswith("-"), limit, after))
        return [Run.model_validate(_run_fields(row)) for row in rows]

    def _run_row(self, run_id: str) -> Row[Any]:
        query = (
            _runs()
            .add_columns(schema.run.c.config, schema.attempt.c.frozen_blocks)
            .where(schema.run.c.run_id == run_id)
        )
        row = self._connection.execute(query).one_or_none()
        if row is None:
            raise UnknownRun(f"no run has the id {run_id!r}; GET /api/v1/runs lists the runs there are")
        return row

    # Frames

    def num_blocks(self, run_id: str, attempt: int) -> int:
        """How deep the model of this attempt is."""
        blocks = self._connection.execute(_BLOCKS, {"run_id": run_id, "attempt": attempt}).scalar_one_or_none()
        if blocks is None:
            current = self._run_row(run_id).attempt
            raise UnknownAttempt(
                f"the run {run_id} has no attempt {attempt}, its attempts are 1 to {current}; "
                "POST /api/v1/runs registers a new one"
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

    def _latest(self, row: Row[Any]) -> Latest | None:
        if row.last_seq is None:
            return None
        frame = schema.frame
        found = self._connection.execute(
            select(frame.c.time, frame.c.layout_id, frame.c.blob).where(
                frame.c.run_id == row.run_id,
                frame.c.attempt == row.last_attempt,
                frame.c.writer == row.last_writer,
                frame.c.seq == row.last_seq,
            )
        ).one_or_none()
        if found is None:  # later ones were hidden, and this one had settled
            return self._latest_settled(row)
        values = unpack(self._slots(row.run_id, found.layout_id, "scalars"), found.blob)["scalars"]
        return _latest(row.last_step, found.time, values)

    def _latest_settled(self, row: Row[Any]) -> Latest:
        stream = Stream(row.run_id, row.last_attempt, row.last_writer)
        number, time = find_settled(self._connection, stream, row.last_step, row.last_seq)
        chunk = schema.chunk.c
        chunks = self._connection.execute(
            select(chunk.metric, chunk.samples, chunk.num_samples)
            .where(stream.of(schema.chunk), chunk.number == number, chunk.kind == "scalars")
            .where(chunk.samples.is_not(None))
        )
        values: dict[str, np.ndarray] = {}
        for metric, packed, num_samples in chunks:
            with suppress(DamagedChunk):  # charts of the metric tell
                steps, samples = unpack_samples(packed, "scalars", num_samples, 1)
                found = samples[steps == row.last_step, 0]
                values |= {metric: found[-1]} if len(found) else {}
        return _latest(row.last_step, time, values)

    def _slots(self, run_id: str, layout_id: int, kind: Kind) -> list[Slot]:
        c = schema.layout.c
        rows = self._connection.execute(
            select(c.kind, c.metric, c.offset_bytes, c.num_rows, c.num_columns)
            .where(c.run_id == run_id, c.layout_id == layout_id, c.kind == kind)
            .order_by(c.metric)
        )
        return [Slot(*row) for row in rows]

    # Alerts

    def alerts(
        self,
        *,
        state: AlertState | None = None,
        run_id: str | None = None,
        project: str | None = None,
        rule: str | None = None,
        family: str | None = None,
        severity: str | None = None,
        is_acknowledged: bool | None = None,
        is_silenced: bool | None = None,
        since: datetime | None = None,
        limit: int | None = None,
        after: Place | None = None,
    ) -> list[Alert]:
        """At most `limit` alerts, newest first, from `after` on; `since` is the oldest change of state."""
        alert = schema.alert.c
        wanted = (
            (_SHOWN_STATE, state),
            (alert.run_id, run_id),
            (schema.run.c.project, project),
            (alert.rule, rule),
            (alert.family, family),
            (alert.severity, severity),
            (alert.acknowledged_at.is_not(None), is_acknowledged),
            (silences.is_silenced(), is_silenced),
        )
        query = select_alerts().where(*(column == value for column, value in wanted if value is not None))
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
                f"no alert has the id {alert_id!r}; GET /api/v1/alerts lists those there are: one that was only pending "
                "goes away, and so do those of a run that is deleted"
            )
        return alert_of(row)

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

    def live_runs(self, *, running_since: float, ended_since: float) -> list[LiveRun]:
        """The newest frames of running runs heard of since `running_since`, of others since `ended_since`."""
        run, frame = schema.run.c, schema.frame
        loss, similarity = schema.layout.alias("loss"), schema.layout.alias("similarity")
        rows = self._connection.execute(
            select(
                run.run_id,
                run.project,
                run.run,
                run.last_step,
                run.updated_at,
                run.loss.label("last_loss"),
                frame.c.seq,
                func.substr(frame.c.blob, loss.c.offset_bytes + 1, 8).label("loss"),
                func.substr(frame.c.blob, similarity.c.offset_bytes + 1, 4 * similarity.c.num_rows).label("similarity"),
            )
            .select_from(schema.run)
            .outerjoin(
                frame,
                and_(
                    frame.c.run_id == run.run_id,
                    frame.c.attempt == run.last_attempt,
                    frame.c.writer == run.last_writer,
                    frame.c.seq == run.last_seq,
                ),
            )
            .outerjoin(loss, slot_of(loss.c, frame.c, "scalars", "loss"))
            .outerjoin(similarity, slot_of(similarity.c, frame.c, "layers", "token_similarity"))
            .where(run.updated_at >= case((run.state == "running", running_since), else_=ended_since))
            .order_by(run.run_id)
        )
        return [
            LiveRun(row.run_id, row.project, row.run, row.last_step, row.updated_at, *self._live_values(row))
            for row in rows
        ]

    def _live_values(self, row: Row[*tuple[Any, ...]]) -> tuple[float | None, list[float]]:
        """Loss and token similarity of the newest frame."""
        if row.seq is None and row.last_step is not None:  # later ones were hidden, and this one had settled
            at = {"from_step": row.last_step, "to_step": row.last_step}
            similarities = self.metric(row.run_id, "layers", "token_similarity", **at).samples().values
            return row.last_loss, similarities[-1].tolist() if len(similarities) else []
        loss = None if row.loss is None else float(np.frombuffer(row.loss, item_type("scalars"))[0])
        similarity = [] if row.similarity is None else np.frombuffer(row.similarity, item_type("layers")).tolist()
        return loss, similarity

    def firing_alerts(self) -> list[FiringAlert]:
        """All that fires; what fires more than once on a run is named once."""
        alert = schema.alert.c
        rows = self._connection.execute(
            select(alert.run_id, alert.rule, alert.severity).where(alert.state == "firing").distinct()
        )
        return [FiringAlert(*row) for row in rows]


def _runs() -> Select[Any]:
    """Runs with their current attempt's blocks, without configs: those may be large, and a list shows none."""
    alert = schema.alert.c
    num = select(func.count()).where(alert.run_id == schema.run.c.run_id)
    num_open = num.where(alert.state.in_(OPEN)).scalar_subquery()
    at_end = num.where(alert.resolved_reason == "run ended", alert.attempt == schema.run.c.attempt).scalar_subquery()
    columns = [column for column in schema.run.c if column is not schema.run.c.config]
    counts = num_open.label("open_alerts"), at_end.label("alerts_at_end")
    return select(*columns, schema.attempt.c.blocks, *counts).join(
        schema.attempt,
        and_(schema.attempt.c.run_id == schema.run.c.run_id, schema.attempt.c.attempt == schema.run.c.attempt),
    )


def _run_fields(row: Row[Any]) -> dict[str, Any]:
    fields = {name: value for name, value in row._mapping.items() if name in Run.model_fields}
    stepped_at = None if row.stepped_at is None else utc(row.stepped_at)
    times = {"created_at": utc(row.created_at), "updated_at": utc(row.updated_at), "stepped_at": stepped_at}
    loss = row.loss if row.loss is not None and np.isfinite(row.loss) else None
    return fields | times | {"num_blocks": len(row.blocks), "loss": loss}


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


def page_of(
    query: Select[Any], keys: tuple[ColumnElement[Any], ...], descending: bool, limit: int | None, after: Place | None
) -> Select[Any]:
    """`limit` rows in the order of `keys`, from `after` on: by key, so that rows written meanwhile shift nothing."""
    if after is not None:
        place = tuple_(*keys), tuple_(*(literal(value) for value in after.key))
        query = query.where(place[0] < place[1] if descending else place[0] > place[1])
    return query.order_by(*(key.desc() if descending else key for key in keys)).limit(limit)


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
