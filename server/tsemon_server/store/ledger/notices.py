"""Messages about incidents: changes, deliveries to receivers, and their outcome.

A change of an alert or of its incident leaves a `notice`, in the transaction that changes it. Routing turns it into a
`delivery` for each receiver that has not heard of the incident yet, which stays as the log of what was sent. A notice or
delivery about an incident has the id of one of its alerts that fired. An alert without an incident, because it only
informs or fired before the server kept incidents, has notices and deliveries of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    case,
    delete,
    distinct,
    func,
    literal,
    null,
    or_,
    select,
    update,
)

from tsemon_answers.alerts import CLEARED, Alert, DeliveryStatus, NoticeKind, Notification
from tsemon_server.incidents import FLAPS_WITHIN
from tsemon_server.store.engine import Database, insert_missing
from tsemon_server.store.ledger import tables
from tsemon_server.store.ledger.alerts import alert_of, last_step, select_alerts
from tsemon_server.store.ledger.attempts import is_live
from tsemon_server.store.ledger.incidents import Incidents, NoticedIncident
from tsemon_server.store.ledger.listing import Place, page_of
from tsemon_server.store.times import utc

UNHEARD_S = 86_400.0
"""A notice that nobody took for so long is forgotten: no service of this database sends any."""
KEPT_S = 30 * 86_400.0
"""The log is kept for so long,"""
KEPT_DELIVERIES = 20_000
"""and at most so many entries of it."""
ROUTED_AT_ONCE = 100
"""So many in one transaction, for which those who write frames wait."""
SENT_AT_ONCE = 1000
"""So many are taken for sending in one go."""
FAR = 1e11
"""A time that does not come: when what was told is told again that is to be told once."""

_notice, _delivery, _alert = tables.notice.c, tables.delivery.c, tables.alert.c


class Plan(NamedTuple):
    """Delivery of an incident or alert to one receiver."""

    receiver: str
    topic: str
    """What is on one topic goes in one message."""
    wait_s: float
    """How long to wait for more on a topic that nothing was sent on yet,"""
    interval_s: float
    """and on one that something was."""
    repeat_s: float | None
    """How often to say that it still fires; None for once."""
    recovery_wait_s: float = 0.0
    """Seconds that an incident must stay recovered before its last message. With 0, each change is a message."""


class Due(NamedTuple):
    """A delivery whose time has come."""

    delivery_id: int
    kind: NoticeKind
    topic: str
    status: DeliveryStatus
    tried_at: float | None
    """When it was tried in vain first, since it was last sent."""
    was_told: bool
    """Whether the receiver was told what came before: if not, it hears of the beginning and the end at once."""
    was_over: bool
    """True if an earlier message reported its end."""
    thread: str | None
    """Thread of the first message that the receiver got on the incident or alert."""
    alert: Alert
    """The alert, or a NoticedIncident."""


class Notices:
    """The notices and deliveries of one database."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = database, clock

    def route(self, plans: Callable[[Alert], Sequence[Plan]]) -> int:
        """Plan who is told of what has changed, oldest first; how many changes there were."""
        with self._database.reading() as connection:
            if connection.execute(select(_notice.notice_id).limit(1)).first() is None:
                return 0  # as nearly always
        with self._database.writing() as connection:
            return _Routing(connection, self._clock(), plans).route()

    def due(self, receiver: str) -> list[Due]:
        """What is to be sent to the receiver now, the longest due first."""
        c = _delivery
        query = (
            _with_alerts(
                *(c.delivery_id, c.kind, c.topic, c.status, c.tried_at, c.labels),
                (~_HAS_MERGED).label("was_told"),
                _WAS_OVER.label("was_over"),
                _THREAD.label("thread"),
            )
            .where(c.receiver == receiver, c.due_at <= self._clock(), ~_may_reopen(self._clock()))
            .order_by(c.due_at, c.delivery_id)
            .limit(SENT_AT_ONCE)
        )
        with self._database.reading() as connection:
            rows = connection.execute(query, {"now": self._clock()}).all()
            told = _told(connection, self._clock(), rows)
        return [
            Due(**{name: getattr(row, name) for name in Due._fields if name != "alert"}, alert=alert)
            for row, alert in zip(rows, told, strict=True)
        ]

    def num_messages(self, receiver: str, seconds: float) -> int:
        """How many messages the receiver was sent in the last `seconds`: all that one message tells has one time."""
        is_recent = and_(_delivery.receiver == receiver, _delivery.sent_at > self._clock() - seconds)
        with self._database.reading() as connection:
            return connection.execute(select(func.count(distinct(_delivery.sent_at))).where(is_recent)).scalar_one()

    def log(
        self,
        *,
        receiver: str | None = None,
        status: DeliveryStatus | None = None,
        limit: int = 50,
        after: Place | None = None,
    ) -> list[Notification]:
        """At most `limit` deliveries, newest first, from `after` on."""
        wanted = ((_delivery.receiver, receiver), (_delivery.status, status))
        query = _with_alerts(*(column for column in _delivery if column.name not in ("alert_id", "run_id", "topic")))
        query = query.where(*(column == value for column, value in wanted if value is not None))
        with self._database.reading() as connection:
            rows = connection.execute(
                page_of(query, (_delivery.delivery_id,), True, limit, after), {"now": self._clock()}
            ).all()
        return [_notification(row) for row in rows]

    def note_sent(self, ids: Collection[int], thread: str | None = None) -> None:
        """The receiver has them, in this thread if it has threads.

        What fires is told again after its time, and waits until then for its end.
        """
        again = case((_is_over(), null()), (_delivery.kind == "firing", self._again()))
        values = {"status": "sent", "sent_at": self._clock(), "due_at": again, "tried_at": null(), "error": null()}
        is_held = and_(_delivery.kind == "resolved", _delivery.is_held)  # what it said
        values |= {} if thread is None else {"thread": thread}
        self._change(ids, attempts=_delivery.attempts + 1, is_held=is_held, **values)

    def note_tried(self, ids: Collection[int], error: str, retry_s: float) -> None:
        """It was in vain, and is tried again."""
        now = self._clock()
        values = {"error": error, "due_at": now + retry_s, "tried_at": func.coalesce(_delivery.tried_at, now)}
        self._change(ids, ~_is_over(), attempts=_delivery.attempts + 1, **values)

    def note_failed(self, ids: Collection[int], error: str) -> None:
        """It was in vain for the last time. That something still fires is told again after its time."""
        was_sent = _delivery.sent_at.is_not(None)
        values = {
            "status": case((was_sent, _delivery.status), else_="failed"),
            "due_at": case((was_sent, self._again())),
        }
        self._change(ids, ~_is_over(), attempts=_delivery.attempts + 1, error=error, tried_at=null(), **values)

    def hold(self, ids: Collection[int], seconds: float) -> None:
        """Nobody wants to hear of them now: ask again after so long."""
        why = "held back: the alert is silenced or acknowledged"
        self._change(ids, ~_is_over(), is_held=True, error=why, due_at=self._clock() + seconds)

    def drop_others(self, receivers: Collection[str]) -> None:
        """Drop what is to be sent to any but these receivers."""
        others = and_(_delivery.receiver.not_in(receivers), ~_is_over())
        dropped = update(tables.delivery).where(others).values(status=_dropped(), due_at=None, changed_at=self._clock())
        with self._database.writing() as connection:
            connection.execute(dropped)

    def forget_old(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Forget what is too old or too much; what is still to be sent stays."""
        now = self._clock()
        with self._database.reading() as connection:
            if is_stopped() or not any(
                connection.execute(select(literal(1)).where(old).limit(1)).first() for old in _old(connection, now)
            ):
                return
        with self._database.writing() as connection:
            for table, old in zip((tables.notice, tables.delivery), _old(connection, now), strict=True):
                connection.execute(delete(table).where(old))

    def _again(self) -> ColumnElement[float]:
        return func.coalesce(self._clock() + _delivery.repeat_s, FAR)

    def _change(self, ids: Collection[int], *only_if: ColumnElement[bool], **values: Any) -> None:
        which = _delivery.delivery_id.in_(ids)
        changed = update(tables.delivery).where(which, *only_if).values(changed_at=self._clock(), **values)
        with self._database.writing() as connection:
            connection.execute(changed)


class _Routing:
    """One transaction that turns notices into deliveries.

    It goes by what an alert is and what each receiver was told last, not by what happened in between: an alert that is
    taken back and fires again a moment later is no news.
    """

    def __init__(self, connection: Connection, now: float, plans: Callable[[Alert], Sequence[Plan]]) -> None:
        self._connection, self._now, self._plans = connection, now, plans
        self._due_at: dict[tuple[str, str], float] = {}
        self._planned: list[dict[str, Any]] = []

    def route(self) -> int:
        notices = self._connection.execute(
            select(_notice.notice_id, _notice.alert_id, _notice.has_fired)
            .order_by(_notice.notice_id)
            .limit(ROUTED_AT_ONCE)
            .with_for_update()
        ).all()
        query = select_alerts().where(_alert.alert_id.in_({notice.alert_id for notice in notices}))
        rows = self._connection.execute(query.order_by(_alert.alert_id), {"now": self._now}).all()
        key_of = {row.alert_id: _key(row) for row in rows}
        fired = {key_of.get(notice.alert_id) for notice in notices if notice.has_fired}
        last = self._last_told(rows)
        news = dict(zip(key_of.values(), _told(self._connection, self._now, rows), strict=True))  # each incident once
        for key, alert in news.items():
            told = last.get(key, {})
            if is_firing(alert):
                self._plan_firing(alert, told)
            else:
                self._plan_over(alert, told)
                if key in fired and alert.state == "resolved" and not is_muted(alert):
                    self._plan_both(alert, told)
        if self._planned:
            insert_missing(self._connection, tables.delivery, self._planned)
        routed = [notice.notice_id for notice in notices]
        self._connection.execute(delete(tables.notice).where(_notice.notice_id.in_(routed)))
        return len(notices)

    def _last_told(self, rows: Sequence[Row[Any]]) -> dict[str, dict[str, Row[Any]]]:
        """Return the last delivery to each receiver, by the key of the incident or alert."""
        found: dict[str, dict[str, Row[Any]]] = {}
        incidents = {int(row.incident_id) for row in rows if row.incident_id is not None}
        meant = or_(_alert.alert_id.in_([row.alert_id for row in rows]), _alert.incident_id.in_(incidents))
        query = select(tables.delivery, _alert.incident_id).join(tables.alert, _alert.alert_id == _delivery.alert_id)
        for row in self._connection.execute(query.where(meant).order_by(_delivery.turn)):
            found.setdefault(_key(row), {})[row.receiver] = row
        return found

    def _plan_firing(self, alert: Alert, told: Mapping[str, Row[Any]]) -> None:
        for plan in self._plans(alert):
            last = told.get(plan.receiver)
            if last is not None and last.kind == "resolved" and last.status == "waiting" and not last.attempts:
                self._take_back(last)
            elif last is not None and last.kind == "firing" and last.status == "waiting" and not last.attempts:
                self._set(last, labels=_labels(alert))  # the cause may be another one by now
            elif last is None or self._is_news(alert, last, plan):
                if last is not None and last.status == "waiting":
                    self._set(last, status="dropped", due_at=None)
                known: dict[str, Any] = {"receiver": plan.receiver, "topic": plan.topic, "repeat_s": plan.repeat_s}
                known["labels"] = _labels(alert)
                self._plan(alert, last, kind="firing", due_at=self._next_on(plan), **known)

    def _is_news(self, alert: Alert, last: Row[Any], plan: Plan) -> bool:
        """True if a new message is due: for an incident, one after it was over before its attempt."""
        if last.kind == "firing" or alert.incident_id is None or not plan.recovery_wait_s:
            return bool(last.kind == "resolved" or last.status == "dropped")
        ends = select(func.count()).where(
            *(_delivery.alert_id == last.alert_id, _delivery.receiver == last.receiver, _delivery.kind == "resolved")
        )
        return bool(last.is_held) and self._connection.execute(ends).scalar_one() == 1

    def _take_back(self, over: Row[Any]) -> None:
        """It fires after all, and nobody was told otherwise: let what was said before stand."""
        self._connection.execute(delete(tables.delivery).where(_delivery.delivery_id == over.delivery_id))
        before = and_(
            _delivery.alert_id == over.alert_id, _delivery.receiver == over.receiver, _delivery.turn == over.turn - 1
        )
        was_merged = _delivery.status == "merged"
        values = {
            "status": case((was_merged, "waiting"), else_=_delivery.status),
            "due_at": case((was_merged, over.due_at), else_=func.coalesce(_delivery.sent_at + _delivery.repeat_s, FAR)),
        }
        self._connection.execute(update(tables.delivery).where(before).values(changed_at=self._now, **values))

    def _plan_over(self, alert: Alert, told: Mapping[str, Row[Any]]) -> None:
        """Whoever was told that it fires is told that it is over; who was still to be told hears both at once."""
        known = {plan.receiver: plan for plan in self._plans(alert)}
        for receiver, last in told.items():
            if last.kind == "resolved" or last.status not in ("waiting", "sent"):
                continue
            if last.status == "waiting" and (last.is_held or is_muted(alert) or alert.state != "resolved"):
                self._set(last, status="dropped", due_at=None)
                continue
            plan = known.get(receiver, Plan(receiver, last.topic, 0.0, 0.0, None))
            due_at = last.due_at
            if last.status == "sent":
                wait_s = plan.recovery_wait_s if alert.resolved_reason in CLEARED and alert.incident_id else 0.0
                due_at = max(self._next_on(plan), self._now + wait_s)
            self._set(last, status="sent" if last.status == "sent" else "merged", due_at=None)
            known_as = {"receiver": receiver, "topic": last.topic, "labels": last.labels}
            self._plan(alert, last, kind="resolved", due_at=due_at, is_held=_is_held(alert, plan), **known_as)

    def _plan_both(self, alert: Alert, told: Mapping[str, Row[Any]]) -> None:
        """It fired and was over before anybody was to be told."""
        for plan in self._plans(alert):
            if plan.receiver not in told:
                known = {"receiver": plan.receiver, "topic": plan.topic, "labels": _labels(alert)}
                self._plan(alert, None, kind="firing", status="merged", due_at=None, **known)
                is_held, due_at = _is_held(alert, plan), self._next_on(plan)
                self._plan(alert, None, kind="resolved", turn=2, due_at=due_at, is_held=is_held, **known)

    def _next_on(self, plan: Plan) -> float:
        """When the next message on the plan's topic goes: with what waits there already, or after a while."""
        key = plan.receiver, plan.topic
        if key not in self._due_at:
            self._due_at[key] = self._find_next(plan)
        return self._due_at[key]

    def _find_next(self, plan: Plan) -> float:
        c = _delivery
        is_next = and_(c.status == "waiting", or_(c.kind == "firing", ~c.is_held))
        waits_until, sent_at = self._connection.execute(
            select(func.min(case((is_next, c.due_at))), func.max(c.sent_at)).where(
                c.receiver == plan.receiver, c.topic == plan.topic
            )
        ).one()
        next_at = max(self._now + plan.wait_s, self._now if sent_at is None else sent_at + plan.interval_s)
        return next_at if waits_until is None else min(next_at, float(waits_until))

    def _plan(self, alert: Alert, last: Row[Any] | None, **values: Any) -> None:
        turn = 1 if last is None else last.turn + 1
        row = {
            "run_id": alert.run_id,
            "alert_id": int(alert.alert_id) if last is None else last.alert_id,
            "turn": turn,
            "status": "waiting",
            "attempts": 0,
        }
        row |= {"is_held": False, "created_at": self._now, "changed_at": self._now, "repeat_s": None}
        self._planned.append(row | values)

    def _set(self, row: Row[Any], **values: Any) -> None:
        which = _delivery.delivery_id == row.delivery_id
        self._connection.execute(update(tables.delivery).where(which).values(changed_at=self._now, **values))


def is_firing(alert: Alert) -> bool:
    """Whether it does, seen to or not."""
    return alert.state in ("firing", "acknowledged")


def is_muted(alert: Alert) -> bool:
    """Whether nobody is to be told that it fires."""
    return alert.silenced or alert.acknowledged_at is not None


def _is_held(alert: Alert, plan: Plan) -> bool:
    """True if the incident ended before its attempt. The message waits until it cannot open again."""
    is_last = alert.resolved_reason in ("run ended", "new attempt", "too soon")
    return bool(alert.incident_id and plan.recovery_wait_s) and not is_last


def _key(row: Row[Any]) -> str:
    """Return a key of the incident of the alert in a row, or of the alert if it has no incident."""
    return f"alert {row.alert_id}" if row.incident_id is None else f"incident {row.incident_id}"


def _told(connection: Connection, now: float, rows: Sequence[Row[Any]]) -> list[Alert]:
    """Return the alert of each row, or its incident with the labels of the row."""
    incidents = Incidents(connection, now).told({int(row.incident_id) for row in rows if row.incident_id is not None})
    found = [None if row.incident_id is None else incidents.get(int(row.incident_id)) for row in rows]
    return [alert_of(row) if one is None else _as_told(one, row) for one, row in zip(found, rows, strict=True)]


def _as_told(incident: NoticedIncident, row: Row[Any]) -> NoticedIncident:
    labels = row._mapping.get("labels") or incident.labels
    return incident.model_copy(update={"alert_id": str(row.alert_id), "labels": labels})


def _labels(alert: Alert) -> dict[str, str]:
    return {name: getattr(alert, name) for name in ("rule", "family", "severity")}


def _with_alerts(*columns: Any) -> Select[Any]:
    return select_alerts().add_columns(*columns).join(tables.delivery, _delivery.alert_id == _alert.alert_id)


def _notification(row: Row[Any]) -> Notification:
    fields = {name: value for name, value in row._mapping.items() if name in Notification.model_fields}
    times = {name: row._mapping[name] for name in ("created_at", "sent_at", "due_at")}
    seen = {name: None if time is None or time >= FAR else utc(time) for name, time in times.items()}
    ids = {"notification_id": str(row.delivery_id), "alert_id": str(row.alert_id)}
    named = {"rule": row.labels["rule"]} if row.labels else {}
    return Notification.model_validate(fields | ids | seen | named)


def _is_over() -> ColumnElement[bool]:
    return _delivery.due_at.is_(None)


def _has_before(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """True if the receiver has such a delivery `_before` on the same incident or alert."""
    is_same = _before.alert_id == _delivery.alert_id, _before.receiver == _delivery.receiver
    return select(_before.delivery_id).where(*is_same, *conditions).correlate(tables.delivery).exists()


def _may_reopen(now: float) -> ColumnElement[bool]:
    """True for the last message of an incident that may still open again, while its attempt is live.

    It may open again for FLAPS_WITHIN steps, and while another alert is pending since before. The message also waits while
    another incident is open. After a second opening, it waits for the end of the attempt.
    """
    ended = tables.incident.alias()
    over, other, pending, attempt = (
        ended.c,
        *(table.alias().c for table in (tables.incident, tables.alert, tables.attempt)),
    )
    fails = select(other.incident_id).where(
        *(other.run_id == over.run_id, other.attempt == over.attempt, other.state == "open"),
        (other.family == "liveness") == (over.family == "liveness"),
    )
    may_fire = select(pending.alert_id).where(
        *(pending.run_id == over.run_id, pending.attempt == over.attempt, pending.state == "pending"),
        *(pending.severity != "info", pending.pending_step <= over.ended_step),
    )
    is_soon = last_step(ended) < over.ended_step + FLAPS_WITHIN
    goes_on = (
        select(over.incident_id)
        .where(over.incident_id == _alert.incident_id, over.state != "open")
        .where(attempt.run_id == over.run_id, attempt.attempt == over.attempt, is_live(now, attempt))
        .where(or_(is_soon, may_fire.exists(), fails.exists(), _WAS_OVER))
        .correlate(tables.delivery, tables.alert)
    )
    return and_(_delivery.kind == "resolved", _delivery.is_held, goes_on.exists())


_before = tables.delivery.alias().c
_HAS_MERGED = _has_before(_before.status == "merged", _before.turn == _delivery.turn - 1)
"""Whether it tells what the delivery before it was to tell, too."""
_WAS_OVER = _has_before(_before.kind == "resolved", _before.turn < _delivery.turn)
"""True if an earlier message reported the end."""
_THREAD = (
    select(_before.thread)
    .where(_before.alert_id == _delivery.alert_id, _before.receiver == _delivery.receiver, _before.thread.is_not(None))
    .order_by(_before.turn)
    .limit(1)
    .correlate(tables.delivery)
    .scalar_subquery()
)
"""Thread of the first message."""


def _dropped() -> ColumnElement[str]:
    return case((_delivery.status == "waiting", "dropped"), else_=_delivery.status)


def _old(connection: Connection, now: float) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Which notices and which deliveries are."""
    c = _delivery
    newest = connection.execute(select(func.max(c.delivery_id))).scalar_one() or 0
    is_old = or_(c.delivery_id <= newest - KEPT_DELIVERIES, c.changed_at < now - KEPT_S)
    noticed, told = tables.alert.alias().c, tables.alert.alias().c
    is_about_it = or_(told.alert_id == noticed.alert_id, told.incident_id == noticed.incident_id)
    is_awaited = (
        select(c.delivery_id)
        .where(c.alert_id == told.alert_id, c.due_at.is_not(None), noticed.alert_id == _notice.alert_id, is_about_it)
        .correlate(tables.notice)
        .exists()
    )
    return and_(_notice.queued_at < now - UNHEARD_S, ~is_awaited), and_(_is_over(), is_old)
