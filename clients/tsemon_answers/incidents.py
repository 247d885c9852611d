"""Incidents: the alerts of an attempt that belong together, and their cause."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Annotated, Literal

from pydantic import Field

from tsemon_answers import display
from tsemon_answers.alerts import Moment, Severity
from tsemon_answers.record import Index, OfAttempt, Page, Query, Record

IncidentState = Literal["open", "recovered", "ended"]
ConsequenceState = Literal["firing", "superseded", "resolved", "ended"]


class Failure(Record):
    """The failure that an incident is about, its place and its state."""

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
    where: str | None = None
    """These blocks in words, such as "blocks 0 to 3 of the decoder"; null if `blocks` is."""
    stack: str | None = None
    """Name of their stack; null if the model has a single stack or the rule is about all stacks."""
    head: int | None = None
    """Attention head that stands out in the first of these blocks, from 0; null unless the rule is about attention heads and
    a single head does."""
    state: IncidentState
    """open: an alert still fires, or the loss has not fallen since. recovered: the conditions of all alerts are over, and
    the loss falls again. ended: with the attempt, because a person resolved an alert or disabled its rule, or because
    all conditions are over in a run without a loss, or less than 60 steps before the end of its attempt."""
    ended_step: int | None
    """Step at which its last alert was over; null while it is open."""


class Verdict(Failure):
    """The verdict of an incident: the failure, and the alerts that belong to it."""

    alerts: Sequence[str]
    """Rules of its alerts, the cause first, then in the order in which they fired; each once."""


class IncidentsQuery(Query):
    """The incidents that match every given filter, the newest first, page by page while they are read."""

    state: IncidentState | None = None
    """Only incidents in this state."""
    run_id: Annotated[str | None, Field(alias="run")] = None
    """Only incidents of the run with this id; not a name."""
    attempt: Index = None
    """Only incidents of this attempt."""
    project: str | None = None
    """Only incidents of runs of this project."""
    rule: str | None = None
    """Only incidents whose cause an alert of this rule shows."""
    family: str | None = None
    """Only incidents whose cause is of this family."""
    severity: Severity | None = None
    """Only incidents of this severity."""
    at_end: bool | None = None
    """Only incidents with an alert that was firing when its attempt ended (true), or only the others (false)."""
    since: Moment = None
    """Only incidents that changed at this time or later, as in 2026-01-31T12:00:00Z."""


class IncidentPageQuery(Page, IncidentsQuery):
    """A page of the incidents that match every given filter, newest first."""


class Consequence(Record):
    """An alert of an incident that is not its cause."""

    alert_id: str
    """Id of the alert."""
    rule: str
    """Rule that opened the alert."""
    state: ConsequenceState
    """superseded: its condition is over, but the incident has not recovered. ended: it was firing when its attempt ended."""
    firing_step: int
    """Step at which it fired."""
    resolved_step: int | None
    """Step at which its condition was over; null while it fires."""


class Incident(Verdict):
    """An incident: alerts of one attempt that belong together, with one verdict."""

    incident_id: str
    """Opaque id."""
    run_id: str
    """Run that it is about."""
    project: str
    """Project of that run."""
    run: str
    """Name of that run."""
    attempt: int
    """Attempt that it is about."""
    cause_id: str
    """Alert of the cause. It may be pending until the verdict settles."""
    is_settled: bool
    """False while another cause may turn out to be the likeliest."""
    summary: str
    """One sentence about the cause."""
    advice: dict[str, str]
    """Steps to try (`text`), and the source of that advice (`source`)."""
    consequences: list[Consequence]
    """Its other alerts, in the order in which they fired."""
    acknowledged: bool
    """True if all of its alerts that fire are acknowledged; if none fires while it is open, all alerts."""
    silenced: bool
    """True if all of these alerts are silenced, or some are silenced and the others acknowledged."""
    opened_at: datetime
    """Time at which the server opened it."""
    updated_at: datetime
    """Time at which it last changed."""

    def _repr_html_(self) -> str:
        """Show the verdict and the advice."""
        facts = [
            ("run", f"{self.project}/{self.run}"),
            ("state", self.state),
            ("severity", self.severity),
            ("where", self.where),
            ("since step", self.left_step),
            ("reported at step", self.step),
            ("over at step", self.ended_step),
            ("advice", self.advice.get("text", "")),
            ("also fired", ", ".join(self.alerts[1:])),
        ]
        title = f"<strong>{display.name_of(self.rule)}</strong>: {escape(self.summary)}"
        return f"<div>{title}{display.table(facts)}</div>"


class ToldIncident(Failure):
    """An incident, as the training process receives it."""

    incident_id: str
    """Opaque id."""
    is_settled: bool
    """False while another cause may turn out to be the likeliest."""
    summary: str
    """One sentence about the cause."""
    advice: dict[str, str]
    """Advice (`text`), and its source (`source`)."""


class SubStepQuery(OfAttempt):
    """The sub-step of a block that makes tokens alike or states explode, whether or not there is an incident.

    From the newest values of each metric at that step. Raises UnknownRun, UnknownAttempt, UnknownFrame if nothing is
    recorded, and InvalidRange if the healthy step is not before it.
    """

    step: Annotated[int | None, Field(ge=0, le=2**53)] = Field(None, kw_only=False)
    """Look at the frame nearest to this step; if absent, at the newest frame."""
    healthy_step: Annotated[int | None, Field(ge=0, le=2**53)] = None
    """Compare each block with itself at this step; if absent, with the other blocks."""


class Within(Record):
    """The cause within the step: the sub-step of a block."""

    block: int | None
    """Block, from 0; null if the numbers do not decide."""
    sub_step: Literal["norm", "residual", "attention", "feed-forward"] | None
    """Sub-step of that block; null if the numbers do not decide."""
    metric: str | None
    """Metric that shows it."""
    factor: float | None
    """Its value relative to a healthy sample or to the other blocks."""
    head: int | None
    """Attention head, from 0; null if no single head stands out."""
    step: int | None
    """Newest sampled step that was read; null if nothing was sampled. Each metric has its newest value up to there."""
    healthy_step: int | None
    """The same of the healthy samples; null if the blocks were compared with each other."""
    text: str
    """One or two sentences."""


class SequenceLoss(Record):
    """A sequence of a batch with a large loss."""

    step: int
    """Sampled step whose batch had it."""
    id: int | None
    """53 bits of a hash of the model's inputs, or the id that the user gave it; null if not known."""
    loss: float | None
    """Its mean loss; null if it is not finite."""
    times_mean: float | None
    """Its loss relative to the mean loss of its batch; null if one of them is not known, not finite or not positive."""
    seen_step: int | None
    """Newest earlier sampled step whose batch had it; null if none of the last 65,536 sequences was the same."""
    stands_out: bool
    """True if its loss is at least twice the mean of its batch, or if it is not finite and others are."""
    text: str
    """One to three sentences."""


class IncidentDetail(Incident):
    """An incident with its cause within the step, and the sequences with the largest losses."""

    within: Within
    """The sub-step that brings tokens together or lets states grow, from the samples around the incident."""
    sequences: list[SequenceLoss]
    """Up to 4 sequences with the largest losses from 4 steps before `left_step` to `settles_step`. Sequences that stand
    out come first. Empty unless the family is loss, diverge or data."""


class IncidentPage(Record):
    """A part of the list of incidents."""

    incidents: list[Incident]
    """The incidents, newest first."""
    next_cursor: str | None
    """`cursor` of the next page; null on the last page."""
