"""Incidents, and the alerts that belong to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    String,
    cast,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from tsemon.errors import UnknownIncident
from tsemon.stacks import Stacks
from tsemon_answers.alerts import Alert, ResolvedReason
from tsemon_answers.incidents import (
    Consequence,
    ConsequenceState,
    Failure,
    Incident,
    IncidentsQuery,
    ToldIncident,
    Verdict,
)
from tsemon_server.incidents import ORDER, SHOWN_AFTER, STALL, Symptom, incidents_of
from tsemon_server.incidents import Incident as Group
from tsemon_server.store.engine import value_of
from tsemon_server.store.ledger import silences, tables
from tsemon_server.store.ledger.alerts import alert_of, last_step, select_alerts
from tsemon_server.store.ledger.attempts import state_of
from tsemon_server.store.ledger.listing import SILENT_RULES, Place, fired_to_the_end, matching, page_of
from tsemon_server.store.times import utc

_incident, _alert, _run, _attempt = tables.incident.c, tables.alert.c, tables.run.c, tables.attempt.c

EVERY_INCIDENT = IncidentsQuery()


class NoticedIncident(Alert):
    """An incident as people are notified of it: the alert of its cause, which fires while the incident is open.

    It is silenced if each of its firing alerts is silenced or acknowledged.
    """

    blocks: tuple[int, int] | None
    where: str | None
    """The blocks in words."""
    left_step: int
    settles_step: int | None
    """Until this step, another cause may turn out to be the likeliest; None if that is over."""
    also_fired: list[str]
    """Rules of its alerts besides the rule of the cause."""
    labels: dict[str, str]
    """Rule, family and severity in the first message to the receiver."""
    cause_id: str
    """Id of the alert of the cause. `alert_id` is the first alert, which stays the same."""


class OpenIncident(NamedTuple):
    """An incident that is open and not silenced."""

    run_id: str
    incident_id: int
    rule: str
    family: str
    severity: str
    first_block: int | None
    last_block: int | None


class Incidents:
    """The incidents of all runs."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection, self._now = connection, now
        self._changed = set[int]()
        """Incidents that this transaction has changed."""

    def find(
        self, which: IncidentsQuery = EVERY_INCIDENT, *, limit: int | None = None, after: Place | None = None
    ) -> list[Incident]:
        """At most `limit` incidents, newest first, from `after` on."""
        wanted = (
            (_incident.run_id, which.run_id),
            (_run.project, which.project),
            (_incident.rule, which.rule),
            (_incident.family, which.family),
            (_incident.severity, which.severity),
            (_incident.state, which.state),
            (_incident.attempt, which.attempt),
            (exists().where(_alert.incident_id == _incident.incident_id, fired_to_the_end()), which.at_end),
        )
        query = matching(_select(), wanted, _incident.updated_at, which.since)
        return self._read(page_of(query, (_incident.incident_id,), True, limit, after))

    def get(self, incident_id: str) -> Incident:
        """The incident, or UnknownIncident."""
        found = self._read(_select().where(_incident.incident_id == silences.number_of(incident_id)))
        if not found:
            raise UnknownIncident(
                f"no incident has the id {incident_id!r}; see the list of incidents for the existing ones"
            )
        return found[0]

    def by_ids(self, incident_ids: Collection[int]) -> list[Incident]:
        """The given ones that exist, the oldest first."""
        return self._read(_select().where(_incident.incident_id.in_(incident_ids)).order_by(_incident.incident_id))

    def to_tell(self, run_id: str, attempt: int, alerts: Collection[Alert]) -> list[ToldIncident]:
        """Return the open incidents of an attempt, any just changed, and the last to end, whose reply may have been lost.

        `alerts`: its open alerts, and any just resolved.
        """
        past = tables.incident.alias().c
        ended_at = select(func.max(past.updated_at)).where(
            past.run_id == run_id, past.attempt == attempt, past.state != "open"
        )
        numbers = self._changed | {int(alert.incident_id) for alert in alerts if alert.incident_id is not None}
        is_last = _incident.updated_at == ended_at.scalar_subquery()
        is_told = or_(_incident.state == "open", _incident.incident_id.in_(numbers), is_last)
        query = _select().where(_incident.run_id == run_id, _incident.attempt == attempt, is_told)
        rows = self._connection.execute(query.order_by(_incident.incident_id.desc()))
        return [ToldIncident.model_validate(_fields_of(row, ToldIncident)) for row in rows]

    def told(self, incident_ids: Collection[int]) -> dict[int, NoticedIncident]:
        """The given ones that exist, as people are notified of them."""
        of_attempt = (_attempt.run_id == _incident.run_id) & (_attempt.attempt == _incident.attempt)
        of_end = _attempt.state.label("attempt_state"), last_step(tables.incident).label("last_step")
        query = _select().add_columns(*of_end).outerjoin(tables.attempt, of_attempt)
        rows = self._connection.execute(query.where(_incident.incident_id.in_(incident_ids))).all()
        alerts = self._alerts([row.number for row in rows])
        causes = select_alerts().where(_alert.alert_id.in_([int(row.cause_id) for row in rows]))
        found = {str(row.alert_id): alert_of(row) for row in self._connection.execute(causes, {"now": self._now})}
        return {
            row.number: _told(row, found[row.cause_id], alerts[row.number]) for row in rows if row.cause_id in found
        }

    def open(self) -> list[OpenIncident]:
        """Return open incidents, except those with only silenced alerts."""
        query = select(*(_incident[name] for name in OpenIncident._fields)).where(_incident.state == "open")
        found = [OpenIncident(*row) for row in self._connection.execute(query.order_by(_incident.incident_id))]
        alerts = self._alerts([one.incident_id for one in found])
        return [one for one in found if not all(alert.silenced for alert in _heard(alerts[one.incident_id]))]

    def _read(self, query: Select[Any]) -> list[Incident]:
        rows = self._connection.execute(query).all()
        alerts = self._alerts([row.number for row in rows])
        return [_incident_of(row, alerts[row.number]) for row in rows]

    def _alerts(self, numbers: Collection[int]) -> dict[int, list[Row[Any]]]:
        """The alerts of incidents, in the order in which they fired."""
        found = defaultdict[int, list[Row[Any]]](list)
        columns = _alert.incident_id, _alert.alert_id, _alert.rule, _alert.family, _alert.severity, _alert.state
        told = (
            _alert.firing_step,
            _alert.resolved_step,
            _alert.resolved_reason,
            _alert.acknowledged_at,
            silences.is_silenced().label("silenced"),
        )
        query: Select[Any] = select(*columns, *told).join(tables.run, _run.run_id == _alert.run_id)
        query = query.where(_alert.incident_id.in_(numbers)).order_by(_alert.firing_step, _alert.alert_id)
        for row in self._connection.execute(query, {"now": self._now}) if numbers else ():
            found[row.incident_id].append(row)
        return found


class IncidentChanges(Incidents):
    """Changes of incidents."""

    def regroup(self, attempts: Iterable[tuple[str, int]]) -> None:
        """Update the incidents of these runs and attempts from their alerts."""
        for run_id, attempt in sorted(attempts):
            self._regroup(run_id, attempt)

    def _regroup(self, run_id: str, attempt: int) -> None:
        symptoms = self._symptoms(run_id, attempt)
        if not any(one.firing_step is not None and not one.is_stall for one in symptoms):
            return
        of_attempt = (_incident.run_id == run_id, _incident.attempt == attempt)
        before = {row.incident_id: row for row in self._connection.execute(select(tables.incident).where(*of_attempt))}
        newest = select(last_step(tables.attempt)).where(_attempt.run_id == run_id, _attempt.attempt == attempt)
        step = self._connection.execute(newest).scalar_one_or_none()
        run = self._connection.execute(select(_run.loss, _run.latest).where(_run.run_id == run_id)).first()
        has_loss = run is not None and _has_loss(run)
        # The message about a recovery is sent when a process is silent, and nothing takes it back after a restart.
        is_live = state_of(self._connection, run_id, attempt) in ("running", "replaced")
        for group in incidents_of(symptoms):
            verdict = group.verdict(ORDER, step, has_loss=has_loss, last_step=None if is_live else step)
            self._keep(group, verdict, group.cause(ORDER, step), run_id, attempt, before)

    def _symptoms(self, run_id: str, attempt: int) -> list[Symptom]:
        of_attempt = (_alert.run_id == run_id, _alert.attempt == attempt)
        counts = (_alert.severity != "info") | (_alert.rule == STALL)
        query = select(tables.alert).where(*of_attempt, counts, _alert.state != "revised").order_by(_alert.alert_id)
        return [_symptom(row) for row in self._connection.execute(query)]

    def _keep(
        self, group: Group, verdict: Verdict, cause: Symptom, run_id: str, attempt: int, before: dict[int, Row[Any]]
    ) -> None:
        """Write an incident and which alerts it has, as far as they are new."""
        first, last = verdict.blocks or (None, None)
        known = None if group.key is None else before.get(group.key)
        values = {
            "cause_id": cause.key,
            "first_block": first,
            "last_block": last,
            **{name: getattr(verdict, name) for name in ("state", "rule", "family", "severity")},
            **{name: getattr(verdict, name) for name in ("step", "left_step", "settles_step", "ended_step")},
        }
        key = group.key
        if known is None:
            opened = insert(tables.incident).values(
                run_id=run_id, attempt=attempt, opened_at=self._now, updated_at=self._now, **values
            )
            key = self._connection.execute(opened.returning(_incident.incident_id)).scalar_one()
        elif any(getattr(known, name) != value for name, value in values.items()):
            changed = update(tables.incident).where(_incident.incident_id == key)
            self._connection.execute(changed.values(updated_at=self._now, **values))
            self._changed.add(known.incident_id)
        new = [one.key for one in group.symptoms if one.incident != key]
        if new:
            belong = update(tables.alert).where(_alert.alert_id.in_(new)).values(incident_id=key)
            self._connection.execute(belong)
        if known is None or any(getattr(known, name) != values[name] for name in _DECIDES):
            self._queue_notice(group.symptoms[0].key, run_id)

    def _queue_notice(self, alert_id: int | None, run_id: str) -> None:
        """Note a change of the incident of this alert. It may change though its alerts do not, if a loss falls again."""
        values = {"alert_id": alert_id, "run_id": run_id, "has_fired": False, "queued_at": self._now}
        self._connection.execute(insert(tables.notice).values(values))


_DECIDES = "state", "severity", "rule", "family"
"""Columns that decide which receivers get a message about an incident."""


def _symptom(row: Row[Any]) -> Symptom:
    opened = Symptom.of(row.rule, row.family, row.severity, row.pending_step, row.firing_step, row.evidence)
    is_cleared = row.state == "resolved" and row.resolved_reason in (None, "clear")
    return opened.stored(row.alert_id, row.incident_id, row.resolved_step, is_cleared=is_cleared)


def _select() -> Select[Any]:
    place = (
        cast(value_of(_alert.evidence, literal_column(f"'{name}'")), of).label(name)
        for name, of in (("where", String), ("stack", String), ("head", Integer))
    )
    cause = select(_alert.summary, _alert.advice, _alert.alert_id, _alert.firing_step, *place).subquery().c
    columns = [column for column in _incident if column not in (_incident.incident_id, _incident.cause_id)]
    shown = (
        _incident.incident_id.label("number"),
        cast(_incident.incident_id, String).label("incident_id"),
        cast(_incident.cause_id, String).label("cause_id"),
        *(_run.project, _run.run, _run.loss, _run.latest, cause.summary, cause.advice),
        *(cause.where, cause.stack, cause.head),
        # A pending cause is replaced when it is withdrawn, or when another alert changes after that step.
        or_(
            (last_step(tables.incident) >= _incident.settles_step) & cause.firing_step.is_not(None), _is_silent()
        ).label("is_settled"),
    )
    joined = select(*columns, *shown).join(tables.run, _run.run_id == _incident.run_id)
    return joined.join(cause.alert_id.table, cause.alert_id == _incident.cause_id)


def _is_silent() -> ColumnElement[bool]:
    """True if the process of an incident's attempt is silent, so that no step follows."""
    of_attempt = _alert.run_id == _incident.run_id, _alert.attempt == _incident.attempt
    return exists().where(*of_attempt, _alert.state == "firing", _alert.rule.in_(SILENT_RULES))


def _fields_of(row: Row[Any], model: type[Failure]) -> dict[str, Any]:
    blocks = None if row.first_block is None else (row.first_block, row.last_block)
    return {name: value for name, value in row._mapping.items() if name in model.model_fields} | {
        "blocks": blocks,
        "where": row.where or (None if blocks is None else Stacks.of(0).in_words(*blocks)),  # None in older evidence
        "is_settled": bool(row.is_settled) or row.state != "open",
    }


def _told(row: Row[Any], cause: Alert, alerts: Sequence[Row[Any]]) -> NoticedIncident:
    rules, fields = dict.fromkeys(one.rule for one in alerts), _fields_of(row, Failure)
    own = {name: getattr(row, name) for name in ("rule", "family", "severity", "left_step", "incident_id")}
    seen: dict[str, Any] = {
        "alert_id": str(alerts[0].alert_id),
        "state": "firing" if row.state == "open" else "resolved",
        "firing_step": row.step,
        "resolved_step": row.ended_step,
        "resolved_reason": None if row.state == "open" else _end(row, alerts),
        "acknowledged_at": None,
        "silenced": _is_muted(alerts),
        "opened_at": utc(row.opened_at),
        "updated_at": utc(row.updated_at),
        **{name: fields[name] for name in ("blocks", "where")},
        "settles_step": None if row.is_settled or row.state != "open" else row.settles_step,
        "also_fired": [rule for rule in rules if rule != row.rule],
        "labels": {name: own[name] for name in ("rule", "family", "severity")},
        "cause_id": cause.alert_id,
    }
    return NoticedIncident.model_validate(cause.model_dump() | own | seen)


def _heard(alerts: Sequence[Row[Any]]) -> Sequence[Row[Any]]:
    """Return the firing alerts, or all alerts if none fires. They decide whether an incident is silenced."""
    return [one for one in alerts if one.state != "resolved"] or alerts


def _is_acknowledged(alerts: Sequence[Row[Any]]) -> bool:
    return all(one.acknowledged_at is not None for one in _heard(alerts))


def _is_muted(alerts: Sequence[Row[Any]]) -> bool:
    """Whether people hear nothing of an incident, because each of these alerts is silenced or acknowledged."""
    return all(one.silenced or one.acknowledged_at is not None for one in _heard(alerts))


def _end(row: Row[Any], alerts: Iterable[Row[Any]]) -> ResolvedReason:
    """Why an incident is over."""
    if row.state == "recovered":
        return "clear"
    reasons: list[ResolvedReason] = [
        one.resolved_reason for one in alerts if one.resolved_reason not in (None, "clear")
    ]
    if reasons:
        return reasons[0]
    if not _has_loss(row):
        return "no loss"
    if row.attempt_state == "running":
        return "by hand"  # a person resolved the alert on a loss that had stalled, or disabled its rule
    ended_step = max((one.resolved_step for one in alerts if one.resolved_step is not None), default=None)
    if row.ended_step == ended_step and (row.last_step or 0) < row.ended_step + SHOWN_AFTER:
        return "too soon"
    return "new attempt" if row.attempt_state == "replaced" else "run ended"  # the loss had stalled


def _has_loss(run: Any) -> bool:
    """Whether the run of a row gives losses. SQLite stores NaN as NULL, so the scalars of the newest frame count, too."""
    return run.loss is not None or "loss" in (run.latest or {}).get("scalars", ())


def _state(alert: Row[Any], *, has_recovered: bool) -> ConsequenceState:
    """The state of an alert of an incident. has_recovered: whether the incident has."""
    if alert.state != "resolved":
        return "firing"
    if alert.resolved_reason in ("run ended", "new attempt"):
        return "ended"
    is_lasting = not has_recovered and alert.resolved_reason in (None, "clear")
    return "superseded" if is_lasting else "resolved"


def _incident_of(row: Row[Any], alerts: Sequence[Row[Any]]) -> Incident:
    each = {  # of a rule that flaps, the newest alert
        one.rule: Consequence(
            alert_id=str(one.alert_id),
            rule=one.rule,
            state=_state(one, has_recovered=row.state == "recovered"),
            firing_step=one.firing_step,
            resolved_step=one.resolved_step,
        )
        for one in alerts
    }
    is_open, is_silenced = row.state == "open", all(one.silenced for one in _heard(alerts))
    return Incident.model_validate(
        _fields_of(row, Incident)
        | {
            "alerts": list(dict.fromkeys((row.rule, *(one.rule for one in alerts)))),
            "consequences": [one for one in each.values() if one.rule != row.rule],
            "acknowledged": is_open and _is_acknowledged(alerts),
            "silenced": is_open and (is_silenced or (_is_muted(alerts) and not _is_acknowledged(alerts))),
            "opened_at": utc(row.opened_at),
            "updated_at": utc(row.updated_at),
        }
    )
