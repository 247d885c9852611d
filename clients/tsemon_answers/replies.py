"""Responses to a training process: to its frames and its heartbeats."""

from __future__ import annotations

from pydantic import Field

from tsemon_answers.alerts import Alert
from tsemon_answers.incidents import ToldIncident
from tsemon_answers.record import Record


class Receipt(Record):
    """The outcome of a body of frames. All of it is committed."""

    accepted: int
    """Number of frames that are new."""
    duplicates: int
    """Number of frames that were stored before, or that the body has twice."""
    last_seq: int | None
    """Largest seq of the body; null if it has no frame."""
    alerts: list[Alert]
    """The attempt's pending and firing alerts, and alerts that this body resolved."""
    incidents: list[ToldIncident] = Field(default_factory=list)
    """The attempt's open incidents, incidents that this body ended, and the last one to end. Newest first."""
    live_attempts: list[int]
    """Other attempts of the run whose processes are alive."""


class Pulse(Record):
    """The response to a heartbeat."""

    alerts: list[Alert]
    """The attempt's pending and firing alerts."""
    incidents: list[ToldIncident] = Field(default_factory=list)
    """The attempt's open incidents and the last one to end. Newest first."""
    live_attempts: list[int]
    """Other attempts of the run whose processes are alive."""
