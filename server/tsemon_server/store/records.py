"""What the store hands out, which is also what the REST routes answer with."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tsemon.wire import AlertState, RunState


class Record(BaseModel):
    """A value with a described schema."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


Condition = Literal["running", "silent", "stuck", "finished", "failed"]


class Run(Record):
    """A training run as lists show it."""

    run_id: str
    """Opaque id, part of every URL about the run."""
    project: str
    """The project that the run belongs to."""
    run: str
    """The name that the user gave it, unique in the project."""
    state: RunState
    """What the writer last said: running, finished or failed."""
    condition: Condition
    """The state, and of a run that goes on how its process does: silent or stuck while an alert says so, else running."""
    attempt: int
    """The current attempt; the first is 1."""
    num_blocks: int
    """The depth of the model in the current attempt."""
    tags: list[str]
    """Free words for filters."""
    created_at: datetime
    """When the run was first registered."""
    updated_at: datetime
    """When the run was last heard of."""
    last_step: int | None
    """The largest step that is stored and not hidden by a later attempt; null before the first frame."""
    num_frames: int
    """How many frames are stored, all attempts together."""
    loss: float | None
    """The last loss; null where there is none or it is not finite."""
    process_step: int | None
    """The step that the training process was last heard to be at, sampled or not; null before it was heard of."""
    stepped_at: datetime | None
    """When it was first heard to be there: it is stuck where this is long ago and `updated_at` is not."""
    open_alerts: int
    """How many alerts are pending or firing."""
    alerts_at_end: int
    """How many, of warning or critical, fired when the run was finished or failed; 0 while it goes on."""


class TagUse(Record):
    """A tag, and how many runs have it."""

    tag: str
    """The tag."""
    runs: int
    """How many."""


ResolvedReason = Literal["clear", "new attempt", "run ended", "rule disabled", "by hand"]


class Attempt(Record):
    """One start of the training process."""

    attempt: int
    """Its number, from 1."""
    resume_step: int | None
    """The step that it started at; null for the start of the run."""
    started_at: datetime
    """When it was registered."""


class Recorded(Record):
    """Which metrics the run has frames for."""

    scalars: list[str]
    """Metrics with one number per step."""
    layers: dict[str, int]
    """Metrics with a number per layer, and how many layers."""
    heads: dict[str, tuple[int, int]]
    """Metrics with a number per head, and how many blocks and heads."""


class Latest(Record):
    """The frame with the largest step."""

    step: int
    """Its step."""
    time: float
    """When the writer made it, in seconds since 1970, UTC."""
    scalars: dict[str, float | None]
    """Its numbers; null where they are not finite."""


class OwnQuantity(Record):
    """A metric of the user's own."""

    axis: Literal["activation", "block", "run"]
    """activation: a value per block and one for the first block's input. block: one per block. run: one per step."""
    title: str
    """Its meaning in a few words."""
    equation: str
    """How it is defined."""
    unit: str
    """Its unit."""
    low: float | None
    """Smallest possible value; null if there is no bound."""
    high: float | None
    """Largest possible value; null if there is no bound."""
    log_scale: bool
    """True if charts should use a logarithmic scale."""


class RunDetail(Run):
    """A training run with all that is known about it besides its frames."""

    blocks: list[str]
    """The names of the model's blocks in depth order, as registered by the current attempt."""
    frozen_blocks: list[int]
    """Indexes of those that are not trained, on purpose."""
    not_measured: dict[str, str]
    """Why metrics are not measured, by name, as the current attempt's writers said last."""
    config: dict[str, Any]
    """What the user registered with the run."""
    quantities: dict[str, OwnQuantity]
    """Metrics of the user's own, by name."""
    attempts: list[Attempt]
    """All attempts, oldest first."""
    metrics: Recorded
    """What can be asked for."""
    latest: Latest | None
    """The newest frame's numbers; null before the first frame."""


class Alert(Record):
    """What a rule has to say about a run."""

    alert_id: str
    """Opaque id."""
    run_id: str
    """The run it is about."""
    project: str
    """That run's project."""
    run: str
    """That run's name."""
    attempt: int
    """The attempt in which it opened."""
    rule: str
    """The rule that opened it."""
    rule_version: int | None = None
    """Which version of the rule; null where it opened before versions were kept."""
    family: str
    """The kind of trouble the rule looks for."""
    severity: Literal["info", "warning", "critical"]
    """How bad that is."""
    state: AlertState
    """pending: the condition holds, not yet for long enough. firing: it did. acknowledged: it fires, and somebody has
    seen to it. resolved: it is over."""
    pending_step: int
    """The step at which the condition was first met."""
    firing_step: int | None
    """The step at which it had held for long enough."""
    resolved_step: int | None
    """The step at which it was over. A new attempt ends what fires at the step it starts at, but never before it fired."""
    resolved_reason: ResolvedReason | None = None
    """clear: the condition was over. Else it still fired: when a new attempt began, when the run ended, when its rule
    was disabled, or when somebody called it over. Null while it is open, and where it was over before reasons were kept.
    """
    acknowledged_at: datetime | None = None
    """When somebody said to have seen it; null where nobody did."""
    acknowledged_by: str | None = None
    """Who that was."""
    note: str | None = None
    """What they had to say."""
    silenced: bool = False
    """Whether a silence applies to it now."""
    summary: str
    """One sentence for people."""
    evidence: dict[str, Any]
    """What the rule saw when the alert last changed to pending or firing."""
    advice: dict[str, str]
    """What to try (`text`), and where that comes from (`source`)."""
    opened_at: datetime
    """When the service opened it."""
    updated_at: datetime
    """When its state last changed."""


class Silence(Record):
    """Alerts of which nobody is told for a while. Those that fit all that is given; null fits everything."""

    silence_id: str
    """Opaque id."""
    rule: str | None
    """The name of their rule."""
    run: str | None
    """The name of their run; * stands for any characters, ? for one."""
    project: str | None
    """Their run's project."""
    family: str | None
    """Their rule's family."""
    until: datetime
    """When it ends by itself."""
    created_at: datetime
    """When it was made."""
    created_by: str
    """Who made it."""
    reason: str
    """Why."""


class RuleVersion(Record):
    """A rule as it was from some moment on."""

    name: str
    """The rule's name."""
    version: int
    """Counts up from 1 with each change. The newest is in force."""
    origin: Literal["built-in", "edited"]
    """Whether it came with the service or over REST."""
    enabled: bool
    """Whether the rule looks at runs."""
    digest: str
    """Of the definition: the same for the same."""
    definition: dict[str, Any]
    """The rule, as rule files write it."""
    created_at: datetime
    """When it was made, or first found in the service."""
