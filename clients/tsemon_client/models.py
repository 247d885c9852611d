"""What the service answers, as values. Each field is one of the REST interface, under its name there.

They do not change once they are read. What a newer service says further is left out, what an older one does not say yet
is None or empty. Times are aware, in UTC; steps are optimizer steps, the first is 0; what is not finite is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from html import escape
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationInfo, model_validator

from tsemon.catalogue import LAYERED
from tsemon.errors import TsemonError
from tsemon.wire import AlertState, RunState
from tsemon_client import display
from tsemon_client.tables import Column, Table, columns_of

Severity = Literal["info", "warning", "critical"]
Condition = Literal["running", "silent", "stuck", "finished", "failed"]
RunOrder = Literal[
    "live", "updated", "-updated", "created", "-created", "name", "-name", "step", "-step", "loss", "-loss", "alerts",
    "-alerts",
]  # fmt: skip
Along = Literal["step", "time", "tokens"]
EventKind = Literal["run", "alert"]

FIRST_CHOICE = "token_similarity"
"""Metric of the heat map that a run is shown with, if the run has it; otherwise its first metric with layers."""
LONG = 8
"""A list of more than so many values is counted, not shown, where a record is printed."""


class Record(BaseModel):
    """A value that the service answered with."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, value if not isinstance(value, list) or len(value) <= LONG else f"<{len(value)} values>"


class Source:
    """Where a record that is shown may ask for more. Records are equal whoever read them, and copies have none."""

    def __init__(self, heatmap: Callable[[str, str], Heatmap] | None = None) -> None:
        self.heatmap = heatmap

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[Source], tuple[()]]:
        return Source, ()


class Run(Record):
    """A training run as lists show it."""

    run_id: str
    """Opaque id, by which all other calls know the run."""
    project: str
    """The project that the run belongs to."""
    run: str
    """The name that the user gave it, unique in the project."""
    state: RunState
    """What the writer last said: running, finished or failed."""
    condition: Condition | None = None
    """How it does: silent and stuck are what the liveness alerts of a running one say."""
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
    """The largest step that is stored and not hidden by a later attempt; None before the first frame."""
    num_frames: int
    """How many frames are stored, all attempts together."""
    loss: float | None
    """The last loss; None where there is none or it is not finite."""
    process_step: int | None
    """The step that the training process was last heard to be at, sampled or not; None before it was heard of."""
    stepped_at: datetime | None
    """When it was first heard to be there: it is stuck where this is long ago and `updated_at` is not."""
    open_alerts: int
    """How many alerts are pending or firing."""
    alerts_at_end: int
    """How many, of warning or critical, fired when the run was finished or failed; 0 while it goes on."""

    _source: Source = PrivateAttr(default_factory=Source)

    @model_validator(mode="after")
    def _remember_source(self, info: ValidationInfo) -> Self:
        if info.context is not None:
            self._source = info.context
        return self

    def _repr_html_(self) -> str:
        """Show the run's facts and its heat map, which is requested when a notebook shows the run."""
        facts = [
            ("state", self.condition or self.state),
            ("step", self.last_step),
            ("loss", "" if self.loss is None else display.number(self.loss)),
            ("attempt", self.attempt),
            ("blocks", self.num_blocks),
            ("open alerts", self.open_alerts),
            ("tags", ", ".join(self.tags)),
            ("last heard of", display.moment(self.updated_at)),
            ("id", self.run_id),
        ]
        name = f"<strong>{display.name_of(self.project)}/{display.name_of(self.run)}</strong>"
        return f"<div>{name}{display.table(facts)}{self._heatmap_html()}</div>"

    def _heatmap_html(self) -> str:
        metric = self._shown_metric()
        if self._source.heatmap is None or self.last_step is None or metric is None:
            return ""
        try:
            return self._source.heatmap(self.run_id, metric)._repr_html_()
        except TsemonError as error:
            return f"<p>No heat map of {escape(metric)}: {escape(str(error))}</p>"

    def _shown_metric(self) -> str | None:
        return FIRST_CHOICE


class Attempt(Record):
    """One start of the training process."""

    attempt: int
    """Its number, from 1."""
    resume_step: int | None
    """The step that it started at; None for the start of the run."""
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
    """Its numbers; None where they are not finite."""


class RunDetail(Run):
    """A training run with all that is known about it besides its frames."""

    blocks: list[str]
    """The names of the model's blocks in depth order, as registered by the current attempt."""
    frozen_blocks: list[int]
    """Indexes of those that are not trained, on purpose."""
    config: dict[str, Any]
    """What the user registered with the run."""
    attempts: list[Attempt]
    """All attempts, oldest first."""
    metrics: Recorded
    """What can be asked for."""
    latest: Latest | None
    """The newest frame's numbers; None before the first frame."""
    not_measured: dict[str, str] = {}
    """Metrics that the newest attempt does not measure, and why."""

    def _shown_metric(self) -> str | None:
        return FIRST_CHOICE if FIRST_CHOICE in self.metrics.layers else next(iter(self.metrics.layers), None)


class RunPage(Record):
    """Some of the runs."""

    runs: list[Run]
    """The runs in the order that was asked for."""
    next_cursor: str | None
    """Where the runs that follow begin; None at the end."""
    total: int | None = None
    """How many match, counted up to 10,000."""


class TagUse(Record):
    """A tag."""

    tag: str
    """The word."""
    runs: int
    """How many runs have it."""


class Tags(Record):
    """The tags that are used most."""

    tags: list[TagUse]
    """The most used first."""


class LossLine(Record):
    """A loss over steps, in few points."""

    step: list[int]
    """The middle of each bucket."""
    mean: list[float | None]
    """The mean of the finite values of each bucket; None where there is none."""


class Worst(Record):
    """The layer of the newest frame that is in most trouble."""

    metric: str
    """What says so."""
    layer: int
    """The layer, from 0."""
    value: float | None
    """The value there; None where it is not finite."""


class Glance(Record):
    """A run at a glance."""

    run_id: str
    """The run."""
    loss: LossLine | None
    """Its loss; None where it has none."""
    worst: Worst | None
    """The layer with a value that is not finite, else that of the highest token similarity; None without either."""


class Glances(Record):
    """Some runs at a glance."""

    glances: list[Glance]
    """In the order in which they were asked for."""


class Buckets(Record):
    """Samples over steps, in buckets where there are more of them than points. All lists have one entry per bucket."""

    step: list[int]
    """The middle between the first and the last sample of each bucket, ascending. A bucket is one step where all fit."""
    min: list[float | None]
    """The least finite value of each bucket; None where there is none."""
    mean: list[float | None]
    """The mean of the finite values of each bucket; None where there is none."""
    max: list[float | None]
    """The largest finite value of each bucket; None where there is none."""
    nonfinite: list[int]
    """How many samples of each bucket are NaN or infinite."""
    damaged: int
    """How many samples of the range are left out, because what holds them is damaged."""


class Series(Buckets, Table):
    """One metric over steps."""

    metric: str
    """The metric's name."""
    layer: int | None
    """The layer; None for a metric of the whole run."""
    head: int | None
    """The head; None for the layer as a whole."""

    def columns(self) -> list[Column]:
        """A row per bucket: step, min, mean, max, nonfinite."""
        return _bucket_columns([self])


class ComparedRun(Buckets):
    """One of the runs that are compared."""

    run_id: str
    """Its id."""
    project: str
    """Its project."""
    run: str
    """Its name."""
    x: list[float | None] = []
    """Where each bucket stands along what was asked for: its step, seconds since the run's first frame, or tokens."""


class Comparison(Record, Table):
    """One metric of several runs over the same buckets of steps."""

    metric: str
    """The metric's name."""
    layer: int | None
    """The layer; None for a metric of the whole run."""
    head: int | None
    """The head; None for the layer as a whole."""
    along: Along = "step"
    """What `x` of the runs is: steps, seconds since a run's first frame, or tokens that it has seen."""
    runs: list[ComparedRun]
    """The runs in the order that was asked for; without samples those that do not have the metric."""

    def columns(self) -> list[Column]:
        """A row per run and bucket: run_id, project, run, x, step, min, mean, max, nonfinite."""
        texts = [
            Column(name, str, [getattr(run, name) for run in self.runs for _ in run.step])
            for name in ("run_id", "project", "run")
        ]
        x = Column("x", float, [x for run in self.runs for x in (run.x or run.step)])
        return [*texts, x, *_bucket_columns(self.runs)]


def _bucket_columns(runs: Sequence[Buckets]) -> list[Column]:
    types = {"step": int, "min": float, "mean": float, "max": float, "nonfinite": int}
    return [Column(name, kind, [v for run in runs for v in getattr(run, name)]) for name, kind in types.items()]


class Heatmap(Record, Table):
    """One metric over steps and layers."""

    metric: str
    """The metric's name."""
    step: list[int]
    """The middle between the first and the last sample of each column, ascending."""
    layers: int
    """How many layers the metric has."""
    values: list[list[float | None]]
    """Per column (one entry per `step`) the mean of the finite values of each layer; None where there is none."""
    damaged: int
    """How many samples of the range are left out, because what holds them is damaged."""
    samples: list[int] | None = None
    """How many samples each column stands for."""
    farthest: list[list[float | None]] | None = None
    """Per column the finite value of each layer that is farthest from its mean; None unless `extremes` was asked for."""
    nonfinite: list[list[int]] | None = None
    """Per column how many samples of each layer are NaN or infinite; None unless `extremes` was asked for."""

    def columns(self) -> list[Column]:
        """A row per step and layer: step, layer, value; by step, and within a step by layer."""
        layers = range(self.layers)
        return [
            Column("step", int, [step for step in self.step for _ in layers]),
            Column("layer", int, [layer for _ in self.step for layer in layers]),
            Column("value", float, [value for values in self.values for value in values]),
        ]

    def _repr_html_(self) -> str:
        return display.heatmap(self.metric, self.step, self.layers, self.values, LAYERED.get(self.metric))


class RecordedFrame(Record, Table):
    """All that was recorded of one step."""

    attempt: int
    """The attempt that it belongs to."""
    step: int
    """Its step."""
    time: float
    """When the writer made it, in seconds since 1970, UTC."""
    scalars: dict[str, float | None]
    """Metrics with one number."""
    layers: dict[str, list[float | None]]
    """Metrics with a number per layer, from the first to the last."""
    heads: dict[str, list[list[float | None]]]
    """Metrics with a number per head: per block one per head."""

    def columns(self) -> list[Column]:
        """A row per value: metric, layer, head, value; layer and head are empty where there is none."""
        rows: list[tuple[str, int | None, int | None, float | None]] = [
            *((metric, None, None, value) for metric, value in self.scalars.items()),
            *((metric, i, None, value) for metric, values in self.layers.items() for i, value in enumerate(values)),
            *(
                (metric, i, j, value)
                for metric, blocks in self.heads.items()
                for i, values in enumerate(blocks)
                for j, value in enumerate(values)
            ),
        ]
        types = {"metric": str, "layer": int, "head": int, "value": float}
        return [Column(name, kind, [row[i] for row in rows]) for i, (name, kind) in enumerate(types.items())]


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
    """Which version of the rule; None where it opened before versions were kept."""
    family: str
    """The kind of trouble the rule looks for."""
    severity: Severity
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
    resolved_reason: Literal["clear", "new attempt", "run ended", "rule disabled", "by hand"] | None = None
    """clear: the condition was over. Else it still fired: when a new attempt began, when the run ended, when its rule
    was disabled, or when somebody called it over."""
    acknowledged_at: datetime | None = None
    """When somebody said to have seen it; None where nobody did."""
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
    """Some of the alerts."""

    alerts: list[Alert]
    """The alerts, newest first."""
    next_cursor: str | None
    """Where the alerts that follow begin; None at the end."""


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


class ExplainedLine(Record):
    """One line of a condition, as people read it."""

    depth: int
    """How far it is indented: it belongs to the last line above it that is less so."""
    text: str
    """A comparison, or what joins the lines below it."""


class ExplainedHold(Record):
    """How long something must last: both of them."""

    samples: int
    """So many samples in a row."""
    steps: int
    """So many steps from the first to the last of them; of a rule that reads the clock, seconds."""


class ExplainedRule(Record):
    """A rule in words and whole: with what its definition leaves to the defaults."""

    watches: list[str]
    """The metrics that it reads to be met."""
    when: list[ExplainedLine]
    """When it is met."""
    hold: ExplainedHold
    """For how long it must be met before it fires."""
    clear: list[ExplainedLine]
    """When it is over; none where that is when it is not met."""
    clear_hold: ExplainedHold
    """For how long it must be over before it is resolved."""
    only_while: list[ExplainedLine]
    """While it is judged; none for always."""
    after: ExplainedHold
    """How much of an attempt it lets pass before it is judged."""


class Rules(Record):
    """The rules that the service knows."""

    rules: list[RuleVersion]
    """The newest version of each, also of those that are disabled, by name."""
    explained: dict[str, ExplainedRule]
    """By name what each says. One that was written for another version of tsemon is not among them."""


class RuleHistory(Record):
    """What a rule was from when on."""

    versions: list[RuleVersion]
    """All versions, the newest first: that one is in force."""


class RuleStanding(Record):
    """How one rule stands on a run."""

    rule: str
    """Its name."""
    title: str
    """What it looks for."""
    family: str
    """The kind of trouble."""
    severity: Severity
    """How bad that is."""
    state: Literal["quiet", "pending", "firing", "unknown"]
    """unknown: it has never had all that it needs."""
    judged_step: int | None
    """The last step at which it had all that it needs; None for rules that read the clock instead of frames."""
    not_measured: list[str]
    """Metrics that it reads and the run has never had."""


class RuleStandings(Record):
    """How the rules stand on a run."""

    step: int | None
    """The last step that they have seen of its current attempt; None where they saw none."""
    rules: list[RuleStanding]
    """The rules that are in force."""


class TriedAlert(Record):
    """An alert that the rules would have raised."""

    rule: str
    """The rule."""
    family: str
    """The kind of trouble that it looks for."""
    severity: Severity
    """How bad that is."""
    pending_step: int
    """The step at which its condition was first met."""
    firing_step: int
    """The step at which it had held for long enough."""
    resolved_step: int | None
    """The step at which it was over; None where it fires to the end."""
    summary: str
    """One sentence for people."""
    evidence: dict[str, Any]
    """What the rule saw when it fired."""
    advice: dict[str, str]
    """What to try (`text`), and where that comes from (`source`)."""


class Tried(Record):
    """What the rules would have said."""

    alerts: list[TriedAlert]
    """What would have fired, in that order."""
    num_frames: int
    """How many frames the rules have read."""
    problems: list[str]
    """What of the run they could not see."""


class Connected(Record):
    """The service listens: what happens from here on is told. After the first, the connection was lost for a while."""


class RunChanged(Record):
    """A run has new frames, another state, or was registered."""

    run: Run
    """The run as lists show it."""


class AlertChanged(Record):
    """An alert opened or changed."""

    alert: Alert
    """The alert as it is now."""


class RunDeleted(Record):
    """A run is gone, with its frames and alerts."""

    run_id: str
    """Its id."""


Event = Connected | RunChanged | AlertChanged | RunDeleted


R = TypeVar("R", bound=Record)


class Records(list[R], Table):
    """Records as a list that can become a table, with a column per field, and that a notebook shows as one."""

    def __init__(self, model: type[R], records: Iterable[R] = ()) -> None:
        super().__init__(records)
        self._model = model

    def columns(self) -> list[Column]:
        """A row per record, a column per field; lists and objects as JSON text."""
        return columns_of(self._model, self)

    def _repr_html_(self) -> str:
        return display.records(self._model, self)
