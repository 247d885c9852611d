"""Alerts, silences, and who was notified."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetPydanticSchema

from tsemon.wire import AlertState
from tsemon_answers import display
from tsemon_answers.record import OfProject, Page, Query, Record

Severity = Literal["info", "warning", "critical"]
ResolvedReason = Literal["clear", "new attempt", "run ended", "rule disabled", "by hand", "no loss", "too soon"]
CLEARED: frozenset[ResolvedReason] = frozenset(("clear", "no loss"))
"""Reasons that leave an incident which may open again: all conditions are over, and the run is not."""
NoticeKind = Literal["firing", "resolved"]
DeliveryStatus = Literal["waiting", "sent", "failed", "merged", "dropped"]


def _written_out(time: Any) -> Any:
    """Reject a number, which would be read as seconds or milliseconds since 1970."""
    if not isinstance(time, datetime) and not re.match(r"[0-9]{4}-", str(time)):
        raise ValueError("expected a time such as 2026-01-31T12:00:00Z")
    return time


def _read_as(kind: Any) -> GetPydanticSchema:
    """Let a value that callers may write in several ways be read and described as `kind`."""
    return GetPydanticSchema(lambda _, handler: handler(kind))


def _listed(states: Any) -> Any:
    return [states] if isinstance(states, str) else states


States = Annotated[
    AlertState | Sequence[AlertState] | None,
    _read_as(Annotated[list[AlertState], Field(max_length=4), BeforeValidator(_listed)] | None),
]
Moment = Annotated[
    datetime | str | None, _read_as(Annotated[datetime, Field(strict=False), BeforeValidator(_written_out)] | None)
]


class AlertsQuery(Query):
    """The alerts that match every given filter, the newest first, page by page while they are read."""

    state: States = None
    """Only alerts in this state; may be given several times."""
    run_id: Annotated[str | None, Field(alias="run")] = None
    """Only alerts of the run with this id; not a name."""
    project: str | None = None
    """Only alerts of runs of this project."""
    rule: str | None = None
    """Only alerts of this rule."""
    family: str | None = None
    """Only alerts of rules of this family."""
    severity: Severity | None = None
    """Only alerts of this severity."""
    acknowledged: bool | None = None
    """Only alerts that are acknowledged, or only those that are not."""
    silenced: bool | None = None
    """Only alerts that are silenced now, or only those that are not."""
    at_end: bool | None = None
    """Only alerts that `alerts_at_end` of their run counts (warnings and critical alerts that were firing when their attempt
    was finished or failed, unless a later attempt began afterwards), or only others."""
    since: Moment = None
    """Only alerts that changed at this time or later, as in 2026-01-31T12:00:00Z."""


class AlertPageQuery(Page, AlertsQuery):
    """A page of the alerts that match every given filter, newest first."""


class SilencesQuery(OfProject):
    """The silences that have not ended."""


class NotificationsQuery(Page):
    """A page of the notifications, newest first."""

    receiver: str | None = None
    """Only notifications to this receiver."""
    status: DeliveryStatus | None = None
    """Only notifications with this status."""


class Alert(Record):
    """An alert that a rule opened for a run."""

    alert_id: str
    """Opaque id."""
    run_id: str
    """Run that the alert is about."""
    project: str
    """Project of that run."""
    run: str
    """Name of that run."""
    attempt: int
    """Attempt in which the alert opened."""
    rule: str
    """Rule that opened the alert."""
    rule_version: int | None = None
    """Version of the rule; null if the alert opened before versions were kept."""
    family: str
    """Kind of failure that the rule detects."""
    severity: Severity
    """Severity of that failure."""
    state: AlertState
    """pending: the condition holds, but not for long enough yet. firing: it has held for long enough. acknowledged: it is
    firing, and somebody acknowledged it. resolved: it is over."""
    pending_step: int
    """Step at which the condition was first met."""
    firing_step: int | None
    """Step at which the condition had held for long enough."""
    resolved_step: int | None
    """Step at which the alert was over. A new attempt ends alerts at its first step or, if they fired later, at the last
    step of their own attempt."""
    resolved_reason: ResolvedReason | None = None
    """clear: the condition was over. Otherwise the alert was still firing: when a new attempt began, when the run ended,
    when its rule was disabled, or when somebody resolved it. Null while it is open, or if it ended before reasons were
    kept. no loss and too soon are of incidents: all conditions were over, but the run gives no loss, or ended too soon to
    show a recovery."""
    acknowledged_at: datetime | None = None
    """Time of the acknowledgement; null if there is none."""
    acknowledged_by: str | None = None
    """Who acknowledged it."""
    note: str | None = None
    """Note of whoever acknowledged it."""
    silenced: bool = False
    """True if a silence applies to the alert now."""
    superseded: bool = False
    """True if its condition is over, but its incident has not recovered."""
    incident_id: str | None = None
    """Incident that it belongs to; null if it has not fired, only informs, or fired before there were incidents."""
    summary: str
    """One sentence for people."""
    evidence: dict[str, Any]
    """Values that the rule saw when the alert last became pending or firing."""
    advice: dict[str, str]
    """What to try (`text`), and the source of that advice (`source`)."""
    opened_at: datetime
    """Time at which the server opened the alert."""
    updated_at: datetime
    """Time at which its state last changed."""

    def _repr_html_(self) -> str:
        """Show what the rule says, and what it advises."""
        facts = [
            ("run", f"{self.project}/{self.run}"),
            ("state", self.state),
            ("severity", self.severity),
            ("condition met at step", self.pending_step),
            ("fired at step", self.firing_step),
            ("over at step", self.resolved_step),
            ("advice", self.advice.get("text", "")),
            ("acknowledged", " ".join(filter(None, (self.acknowledged_by, self.note)))),
        ]
        title = f"<strong>{display.name_of(self.rule)}</strong>: {escape(self.summary)}"
        return f"<div>{title}{display.table(facts)}</div>"


class AlertPage(Record):
    """A part of the list of alerts."""

    alerts: list[Alert]
    """The alerts, newest first."""
    next_cursor: str | None
    """`cursor` of the next page; null on the last page."""


class Silence(Record):
    """Alerts without notifications for a while: those that match every given field; null matches everything."""

    silence_id: str
    """Opaque id."""
    rule: str | None
    """Name of their rule."""
    run: str | None
    """Name of their run; * stands for any characters, ? for one."""
    project: str | None
    """Project of their run."""
    family: str | None
    """Family of their rule."""
    until: datetime
    """Time at which the silence ends by itself."""
    created_at: datetime
    """Time at which it was created."""
    created_by: str
    """Who created it."""
    reason: str
    """Why."""


class Silences(Record):
    """What is silenced now."""

    silences: list[Silence]
    """Silences that have not ended, the first to end first."""


class Notification(Record):
    """A message to a receiver about an incident or alert, sent or planned."""

    notification_id: str
    """Opaque id."""
    incident_id: str | None = None
    """Incident that it is about; null for an alert without an incident."""
    alert_id: str
    """Alert that it is about, or one of the incident's alerts."""
    run_id: str
    """Run of that alert."""
    project: str
    """Project of that run."""
    run: str
    """Name of that run."""
    rule: str
    """Rule of the alert, or of the incident's likeliest cause at the time of the first message."""
    kind: NoticeKind
    """firing or resolved: what the receiver is told."""
    receiver: str
    """Name of the receiver in the configuration."""
    status: DeliveryStatus
    """waiting: to be sent. sent: the receiver has it. failed: given up. merged: sent together with the end of the alert.
    dropped: no longer of use."""
    attempts: int
    """Number of times it was sent or tried."""
    error: str | None
    """Why it was not sent, the last time it was not."""
    created_at: datetime
    """Time at which it was queued for the receiver."""
    sent_at: datetime | None
    """Time at which it was last sent."""
    due_at: datetime | None
    """Time at which it will be sent next; null if it will not be."""


class NotificationPage(Record):
    """A part of the list of notifications."""

    notifications: list[Notification]
    """The notifications, newest first."""
    next_cursor: str | None
    """`cursor` of the next page; null on the last page."""
