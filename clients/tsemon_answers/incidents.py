"""Incidents: the alerts of an attempt that belong together, and their cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tsemon_answers.alerts import Severity
from tsemon_answers.record import Record

IncidentState = Literal["open", "recovered", "ended"]


class Verdict(Record):
    """The verdict of an incident: the failure, its place and its state."""

    family: str
    """Kind of failure of the likeliest cause."""
    severity: Severity
    """The worst of the alerts."""
    rule: str
    """Rule that saw the likeliest cause."""
    step: int
    """Step at which the first alert fired."""
    left_step: int
    """First sample that was not healthy for the rule of the cause."""
    settles_step: int
    """Until this step, another cause may turn out to be the likeliest."""
    blocks: tuple[int, int] | None
    """First and last block in which the cause's rule was met, from 0; null if it has none or they are not known."""
    state: IncidentState
    """open: an alert still fires, or the loss has not fallen since. recovered: the conditions of all alerts are over, and
    the loss falls again. ended: with the attempt, or because a person resolved an alert or disabled its rule."""
    ended_step: int | None
    """Step at which it ended; null while it is open."""
    alerts: Sequence[str]
    """Rules of its alerts, the cause first, then in the order in which they fired; each once."""
