"""Alerts, as they are and as rules, people and the ends of runs change them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    ScalarSelect,
    Select,
    String,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    update,
)

from tsemon.errors import UnknownAlert, WrongAlertState
from tsemon.wire import AlertState
from tsemon_answers.alerts import Alert, AlertsQuery, ResolvedReason
from tsemon_server.incidents import STALL
from tsemon_server.store.ledger import silences, tables
from tsemon_server.store.ledger.attempts import state_of
from tsemon_server.store.ledger.journal import Journal
from tsemon_server.store.ledger.listing import OPEN, Place, fired_to_the_end, matching, page_of
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.schema import NEVER
from tsemon_server.store.times import utc

_alert, _run = tables.alert.c, tables.run.c

EVERY_ALERT = AlertsQuery()

_SHOWN_STATE = case(
    (and_(_alert.state == "firing", _alert.acknowledged_at.is_not(None)), "acknowledged"), else_=_alert.state
)

_NEVER_FIRED = and_(_alert.state == "resolved", _alert.firing_step.is_(None))
"""A stall of the loss that was pending when the attempt ended."""


def _is_superseded() -> ColumnElement[bool]:
    """Whether the condition of an alert is over, but its incident has not recovered."""
    incident = tables.incident.c
    lasts = select(incident.incident_id).where(
        incident.incident_id == _alert.incident_id, incident.state != "recovered"
    )
    is_over = and_(_alert.state == "resolved", func.coalesce(_alert.resolved_reason, "clear") == "clear")
    return and_(is_over, lasts.correlate(tables.alert).exists())


class FiringAlert(NamedTuple):
    """An alert that fires and is not silenced."""

    run_id: str
    rule: str
    family: str
    severity: str


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


def select_alerts() -> Select[Any]:
    """Alerts as they are at the time `now`."""
    columns = [column for column in _alert if column not in (_alert.state, _alert.incident_id)]
    query = select(
        *columns,
        _SHOWN_STATE.label("state"),
        cast(_alert.incident_id, String).label("incident_id"),
        _run.project,
        _run.run,
        silences.is_silenced().label("silenced"),
        func.coalesce(_is_superseded(), False).label("superseded"),
    )
    return query.join(tables.run, _run.run_id == _alert.run_id).where(~_NEVER_FIRED)


def alert_of(row: Row[Any]) -> Alert:
    return _alert_from(row._asdict())


def _alert_from(row: Mapping[str, Any]) -> Alert:
    times = ("opened_at", "updated_at", "acknowledged_at")
    shown = {name: None if row[name] is None else utc(row[name]) for name in times}
    return Alert.model_validate({**row, **shown, "alert_id": str(row["alert_id"])})


@lru_cache(maxsize=512)
def _alert_as_read(row: tuple[Any, ...]) -> Alert:
    """The alert in a row of `_OPEN_ALERTS`. While the row is the same, it is made once: its evidence has kilobytes."""
    read = dict(zip(_COLUMNS, row, strict=True))
    as_json = {name: json.loads(read[name]) for name in ("evidence", "advice")}
    return _alert_from({**read, **as_json, **{name: bool(read[name]) for name in ("silenced", "superseded")}})


# Built once, for every body of frames asks them.
_OF_ATTEMPT = and_(_alert.run_id == bindparam("run_id"), _alert.attempt == bindparam("attempt"))
_SELECT_OPEN = select_alerts().where(_OF_ATTEMPT, or_(*(_alert.state == state for state in OPEN)))
_OPEN_ALERTS = Prepared(_SELECT_OPEN.order_by(_alert.alert_id.desc()))
_COLUMNS = tuple(str(column.key) for column in _SELECT_OPEN.selected_columns)


class Alerts:
    """The alerts of all runs."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection, self._now = connection, now

    def find(
        self, which: AlertsQuery = EVERY_ALERT, *, limit: int | None = None, after: Place | None = None
    ) -> list[Alert]:
        """At most `limit` alerts, newest first, from `after` on."""
        wanted = (
            (_alert.run_id, which.run_id),
            (_run.project, which.project),
            (_alert.rule, which.rule),
            (_alert.family, which.family),
            (_alert.severity, which.severity),
            (_alert.acknowledged_at.is_not(None), which.acknowledged),
            (silences.is_silenced(), which.silenced),
            (func.coalesce(fired_to_the_end(), False), which.at_end),
        )
        query = matching(select_alerts(), wanted, _alert.updated_at, which.since)
        if which.state:
            query = query.where(_SHOWN_STATE.in_(which.state))
        return self._alerts(page_of(query, (_alert.alert_id,), True, limit, after))

    def get(self, alert_id: str) -> Alert:
        """The alert, or UnknownAlert."""
        found = self._alerts(select_alerts().where(_alert.alert_id == silences.number_of(alert_id)))
        if not found:
            raise UnknownAlert(
                f"no alert has the id {alert_id!r}; one that was only pending goes away, and so do those of a run "
                "that is deleted"
            )
        return found[0]

    def by_ids(self, alert_ids: Collection[int]) -> list[Alert]:
        """The given ones that exist, the oldest first."""
        return self._alerts(select_alerts().where(_alert.alert_id.in_(alert_ids)).order_by(_alert.alert_id))

    def changed_since(self, since: float, run_ids: Collection[str] = ()) -> list[Alert]:
        """Those that have changed since then, and all of these runs; the last changed last."""
        is_changed = _alert.updated_at >= since
        if run_ids:
            is_changed = or_(is_changed, _alert.run_id.in_(run_ids))
        return self._alerts(select_alerts().where(is_changed).order_by(_alert.updated_at, _alert.alert_id))

    def to_tell(self, run_id: str, attempt: int, resolved: Sequence[int] = ()) -> list[Alert]:
        """What the writer of an attempt gets to hear: its open alerts, and those in `resolved`."""
        which = {"run_id": run_id, "attempt": attempt, "now": self._now}
        told = [_alert_as_read(tuple(row)) for row in _OPEN_ALERTS.run(self._connection, which)]
        if not resolved:
            return told
        over = self.by_ids({*resolved} - {int(alert.alert_id) for alert in told})
        return sorted([*told, *over], key=lambda alert: int(alert.alert_id), reverse=True)

    def ended_by_disabling(self, run_id: str, attempt: int) -> set[str]:
        """The rules of an attempt whose last alert ended because the rule was disabled."""
        last = select(func.max(_alert.alert_id)).where(_alert.run_id == run_id, _alert.attempt == attempt)
        query = select(_alert.rule).where(
            _alert.alert_id.in_(last.group_by(_alert.rule)), _alert.resolved_reason == "rule disabled"
        )
        return {*self._connection.execute(query).scalars()}

    def firing(self) -> list[FiringAlert]:
        """All that fires and is not silenced; what fires more than once on a run is named once."""
        query = (
            select(_alert.run_id, _alert.rule, _alert.family, _alert.severity)
            .join(tables.run, _run.run_id == _alert.run_id)
            .where(_alert.state == "firing", ~silences.is_silenced())
            .distinct()
            .order_by(_alert.run_id, _alert.rule)
        )
        return [FiringAlert(*row) for row in self._connection.execute(query, {"now": self._now})]

    def _alerts(self, query: Select[Any], **values: Any) -> list[Alert]:
        return [alert_of(row) for row in self._connection.execute(query, {"now": self._now, **values})]


def _is_of_rule(rule: str, project: str | None, besides: Collection[str]) -> ColumnElement[bool]:
    is_meant = _run.project.not_in(besides) if project is None else _run.project == project
    return and_(_alert.rule == rule, _alert.run_id.in_(select(_run.run_id).where(is_meant)))


class AlertChanges(Alerts):
    """Changes of alerts. Whatever changes whether one fires queues a notice for whoever is to hear of it."""

    def __init__(self, connection: Connection, now: float, journal: Journal) -> None:
        super().__init__(connection, now)
        self._journal = journal
        self.changed = set[tuple[str, int]]()
        """Runs and attempts whose alerts have changed."""

    # By the rules

    def open(self, run_id: str, attempt: int, rule: str, **values: Any) -> None:
        """Add an alert; `values` are the other columns."""
        opened = insert(tables.alert).values(
            run_id=run_id, attempt=attempt, rule=rule, opened_at=self._now, updated_at=self._now, **values
        )
        self.changed.add((run_id, attempt))
        alert_id = self._connection.execute(opened.returning(_alert.alert_id)).scalar_one()
        if values["state"] == "firing":
            self._queue_notices(_alert.alert_id == alert_id, has_fired=True)

    def change(self, run_id: str, attempt: int, rule: str, from_state: AlertState, **values: Any) -> int | None:
        """Change the alert of the rule that is in `from_state`; its id, or None where there is none."""
        mine = (_alert.run_id == run_id, _alert.attempt == attempt, _alert.rule == rule)
        if from_state == "pending":
            self._show_again(*mine)
        which = select(func.max(_alert.alert_id)).where(*mine, _alert.state == from_state)
        alert_id: int | None = self._connection.execute(which).scalar_one()
        if alert_id is not None:
            self.changed.add((run_id, attempt))
            reason = {"resolved_reason": "clear"} if values.get("state") == "resolved" else {}
            self._update(_alert.alert_id == alert_id, **reason, **values)
            self._queue_notices(_alert.alert_id == alert_id, has_fired=values.get("state") == "firing")
        return alert_id

    def withdraw(self, run_id: str, attempt: int, rule: str) -> None:
        """Forget the rule's pending alert."""
        self.changed.add((run_id, attempt))
        mine = (_alert.run_id == run_id, _alert.attempt == attempt, _alert.rule == rule)
        self._connection.execute(delete(tables.alert).where(*mine, or_(_alert.state == "pending", _NEVER_FIRED)))

    def take_back(self, run_id: str, attempt: int, step: int, rules: Collection[str]) -> dict[str, list[TakenBack]]:
        """Let the alerts of `rules` be as they left them after `step`; those that opened or fired later, in order, by rule.

        These are neither open nor over until `revise` or `drop` says what they are. What people or the run's end called
        over later stays so, and is listed too.
        """
        self.changed.add((run_id, attempt))
        self._show_again(_alert.run_id == run_id, _alert.attempt == attempt)
        is_of_rules = func.coalesce(_alert.resolved_reason, "clear") == "clear"
        began_later = or_(_alert.pending_step > step, _alert.firing_step > step)
        listed = case((is_of_rules, began_later), else_=_alert.resolved_step > step)
        mine = and_(_alert.run_id == run_id, _alert.attempt == attempt, _alert.rule.in_(rules))
        steps = (_alert.pending_step, _alert.firing_step, _alert.resolved_step)
        rows = self._connection.execute(
            select(_alert.rule, _alert.alert_id, *steps, is_of_rules.label("is_of_rules"))
            .where(mine, listed)
            .order_by(_alert.alert_id)
        )
        later: dict[str, list[TakenBack]] = {}
        for rule, *row in rows.all():
            later.setdefault(rule, []).append(TakenBack(*row))
        mine = and_(mine, is_of_rules)
        self._queue_notices(and_(mine, or_(began_later, _alert.resolved_step > step)))
        self._connection.execute(update(tables.alert).where(mine, began_later).values(state="revised"))
        is_over = and_(_alert.state != "revised", _alert.resolved_step > step)
        self._connection.execute(update(tables.alert).where(mine, is_over).values(state="firing", **_NOT_OVER))
        return later

    def revise(self, alert_id: int, **values: Any) -> None:
        """Let an alert that was taken back be what `values` say."""
        is_it = self._taken_back(alert_id)
        if values["state"] == "firing":
            self._queue_notices(is_it, has_fired=True)
        self._update(is_it, **_NOT_OVER | values)

    def drop(self, alert_id: int) -> bool:
        """Remove an alert that was taken back, or, where it had fired and people were told, call it over: whether so."""
        is_it = self._taken_back(alert_id)
        self._connection.execute(delete(tables.alert).where(is_it, _alert.firing_step.is_(None)))
        return self._update(is_it, state="resolved", resolved_step=_alert.firing_step, resolved_reason="clear") > 0

    def _taken_back(self, alert_id: int) -> ColumnElement[bool]:
        """That one, but where people or the run's end called it over."""
        return and_(_alert.alert_id == alert_id, _alert.state == "revised")

    # By people

    def acknowledge(self, alert_id: str, by: str, note: str | None) -> Alert:
        """Note who acknowledges an alert. The first acknowledgement stays."""
        seen = {"acknowledged_at": self._now, "acknowledged_by": by, "note": note}
        self._change_open(alert_id, _alert.acknowledged_at.is_(None), **seen)
        return self._open_alert(alert_id, "acknowledged")

    def unacknowledge(self, alert_id: str) -> Alert:
        """Withdraw the acknowledgement."""
        unseen = {"acknowledged_at": None, "acknowledged_by": None, "note": None}
        self._change_open(alert_id, _alert.acknowledged_at.is_not(None), **unseen)
        return self._open_alert(alert_id, "given back")

    def resolve(self, alert_id: str, by: str, note: str | None) -> Alert:
        """Call an alert over that fires. Its rule opens another one only after its condition was over for a while."""
        found = self._open_alert(alert_id, "resolved")
        if found.firing_step is None:
            raise WrongAlertState(f"the alert {alert_id} is only pending; it goes away by itself, or fires")
        over = {"state": "resolved", **_over(_LAST_STEP, "by hand")}
        seen = {"acknowledged_at": self._now, "acknowledged_by": by, "note": note}
        self._change_open(alert_id, _alert.state == "firing", **over, **seen)
        self.changed.add((found.run_id, found.attempt))
        return self.get(alert_id)

    def _change_open(self, alert_id: str, where: ColumnElement[bool], **values: Any) -> None:
        is_it = and_(_alert.alert_id == silences.number_of(alert_id), _alert.state.in_(OPEN), where)
        self._queue_notices(is_it)
        self._update(is_it, **values)

    def _open_alert(self, alert_id: str, what: str) -> Alert:
        found = self.get(alert_id)
        if found.state == "resolved":
            raise WrongAlertState(f"the alert {alert_id} is over, so it cannot be {what}; leave it as it is")
        return found

    # By what becomes of runs and rules

    def end_of_attempt(self, run_id: str, attempt: int, reason: ResolvedReason) -> None:
        """Whatever is open ends with the attempt: what fires is over, what was pending never was.

        A pending stall of the loss is kept, and not shown: the incident has not recovered.
        """
        mine = and_(_alert.run_id == run_id, _alert.attempt == attempt)
        self.changed.add((run_id, attempt))  # an incident may be over that has not recovered
        over = _over(_HIDDEN_FROM if reason == "new attempt" else _LAST_STEP, reason)
        stalls = and_(mine, _alert.state == "pending", _alert.rule == STALL, _alert.severity == "info")
        self._update(stalls, state="resolved", **over)
        self._end(mine, over)

    def end_of_ended(self, run_id: str, attempt: int) -> None:
        """If the attempt has ended already, what frames that came afterwards opened is over with it."""
        state = state_of(self._connection, run_id, attempt)
        if state != "running":
            self.end_of_attempt(run_id, attempt, "new attempt" if state == "replaced" else "run ended")

    def end_of_rule(self, rule: str, project: str | None = None, *, besides: Collection[str] = ()) -> None:
        """Resolve the alerts of a disabled rule: those of runs of `project`, or of all projects but those in `besides`."""
        which = _is_of_rule(rule, project, besides)
        self._update(and_(which, _NEVER_FIRED), resolved_reason="rule disabled")
        self._end(which, _over(_LAST_STEP, "rule disabled"))

    def runs_of_rule(self, rule: str, project: str | None = None, *, besides: Collection[str] = ()) -> list[str]:
        """Ids of the runs whose alerts `end_of_rule` resolves, in order."""
        is_it = and_(_is_of_rule(rule, project, besides), _alert.state.in_(OPEN))
        return [
            *self._connection.execute(select(_alert.run_id).where(is_it).distinct().order_by(_alert.run_id)).scalars()
        ]

    def reopen(self, run_id: str, attempt: int, reason: ResolvedReason) -> None:
        """The attempt has not ended after all, so what fired at its end still does."""
        self.changed.add((run_id, attempt))
        did_end = and_(_alert.run_id == run_id, _alert.attempt == attempt, _alert.resolved_reason == reason)
        self._queue_notices(and_(did_end, ~_NEVER_FIRED))
        self._update(did_end, state=case((_NEVER_FIRED, "pending"), else_="firing"), **_NOT_OVER)

    def _end(self, which: ColumnElement[bool], over: dict[str, Any]) -> None:
        ending = select(_alert.run_id, _alert.attempt).where(which, _alert.state.in_(OPEN)).distinct()
        self.changed.update((row.run_id, row.attempt) for row in self._connection.execute(ending))
        self._connection.execute(delete(tables.alert).where(which, _alert.state == "pending"))
        fires = and_(which, _alert.state == "firing")
        self._queue_notices(fires)
        self._update(fires, state="resolved", **over)

    def _show_again(self, *which: ColumnElement[bool]) -> None:
        """Let a stall that was kept at the end of its attempt be pending: late frames may change it."""
        self._update(and_(*which, _NEVER_FIRED), state="pending", **_NOT_OVER)

    def _update(self, which: ColumnElement[bool], **values: Any) -> int:
        changed = update(tables.alert).where(which).values(updated_at=self._now, **values)
        return self._connection.execute(changed).rowcount

    def _queue_notices(self, which: ColumnElement[bool], *, has_fired: bool = False) -> None:
        """Note that these alerts change, in whichever way: what they are when that is committed is what people hear.

        One that `has_fired` is told of even if it is over by then.
        """
        changed = select(_alert.alert_id, _alert.run_id, literal(has_fired), literal(self._now)).where(which)
        columns = ["alert_id", "run_id", "has_fired", "queued_at"]
        queued = insert(tables.notice).from_select(columns, changed).returning(tables.notice.c.alert_id)
        self._journal.tell_of_alerts(self._connection.execute(queued).scalars())


_NOT_OVER = {"resolved_step": None, "resolved_reason": None}


def _of_attempt(of: FromClause, value: ColumnElement[Any], table: FromClause) -> ScalarSelect[Any]:
    """A value in the row of `table` for the attempt that a row of `of` belongs to."""
    is_it = and_(table.c.run_id == of.c.run_id, table.c.attempt == of.c.attempt)
    return select(value).where(is_it).correlate(of).scalar_subquery()


def _runs_last_step(of: FromClause) -> ScalarSelect[Any]:
    run = tables.run.alias()
    query = select(func.coalesce(run.c.last_step, 0)).where(run.c.run_id == of.c.run_id)
    return query.correlate(of).scalar_subquery()


def _hidden_from(of: FromClause) -> ScalarSelect[Any]:
    """The step at which a later attempt took over, or else the last one of the run."""
    attempt = tables.attempt.alias()
    step = attempt.c.hidden_from
    return _of_attempt(of, case((step < NEVER, step), else_=_runs_last_step(of)), attempt)


def last_step(of: FromClause) -> ColumnElement[Any]:
    """The last step of the attempt that a row of `of` belongs to.

    The last step of a run is of another attempt if a later one hides the end of this one. Its process may still be alive.
    """
    attempt, progress = tables.attempt.alias(), tables.rule_progress.alias()
    is_hidden = _of_attempt(of, attempt.c.hidden_from, attempt) < NEVER
    read_to = _of_attempt(of, progress.c.read_to, progress)
    return case((is_hidden, func.coalesce(read_to, _hidden_from(of))), else_=_runs_last_step(of))


_HIDDEN_FROM, _LAST_STEP = _hidden_from(tables.alert), last_step(tables.alert)


def _over(step: ColumnElement[Any], reason: ResolvedReason) -> dict[str, Any]:
    """The values of alerts that end at `step` though they fire."""
    fired = _alert.firing_step
    # Not before it fired: it was there, even if its frames are hidden now, and lasted as long as its attempt.
    last = case((fired >= _LAST_STEP, fired), else_=_LAST_STEP)
    return {"resolved_step": case((fired >= step, last), else_=step), "resolved_reason": reason}
