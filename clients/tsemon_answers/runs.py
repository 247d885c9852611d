"""Runs: lists of them, all about one, their tags, and runs at a glance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, PrivateAttr

from tsemon.catalogue import Axis
from tsemon.errors import TsemonError
from tsemon.stacks import Stacks
from tsemon.wire import NAME, RunState
from tsemon_answers import display
from tsemon_answers.incidents import Incident
from tsemon_answers.record import Newer, OfProject, Page, Query, Record
from tsemon_answers.series import Heatmap

Condition = Literal["running", "silent", "stuck", "finished", "failed"]
RunOrder = Literal[
    "live", "updated", "-updated", "created", "-created", "name", "-name", "step", "-step", "loss", "-loss", "alerts",
    "-alerts",
]  # fmt: skip
"""`live`: runs with a live process first, newest first, then all others, last seen first."""

FIRST_CHOICE = "token_diversity"
"""Metric that is shown first of every run that has it."""


class RunFilter(OfProject):
    """The runs that match every given filter."""

    run: str | None = None
    """Only runs of this name; not an id."""
    state: RunState | None = None
    """Only runs in this state."""
    condition: Condition | None = None
    """Only runs in this condition: a state, or silent or stuck."""
    tags: Annotated[Sequence[str], Field(alias="tag", max_length=20)] = ()
    """Only runs with this tag; if given several times, only runs with all of them."""
    q: Annotated[str | None, Field(max_length=200)] = None
    """Only runs with this text in their name, project or a tag, ignoring case."""


class RunsQuery(RunFilter):
    """The runs that match every given filter, in an order, page by page while they are read.

    A run that is updated between two pages changes its place in the order by update; in the others it does not.
    """

    order: RunOrder = "-updated"
    """Sort key, descending with a minus. `live` has one direction only."""


class RunPageQuery(Page, RunsQuery):
    """A page of the runs that match every given filter."""


class TagsQuery(OfProject):
    """The 200 tags that most runs have, with the number of their runs."""


class GlancesQuery(Query):
    """The loss of up to 100 runs in a few points, and the layer of each that is in most trouble."""

    run_ids: Annotated[Sequence[str], Field(alias="run", max_length=100)] = Field(kw_only=False)
    """Ids of up to 100 runs."""
    points: Annotated[int, Field(ge=3, le=200)] = 40
    """Maximum number of buckets per run."""


class Source:
    """How a run that a notebook shows asks for its incidents and its heat map. Runs are equal whoever read them, and copies
    have none."""

    def __init__(self, heatmap: Callable[[str, str], Heatmap], incidents: Callable[[str], Sequence[Incident]]) -> None:
        self.heatmap = heatmap
        self.incidents = incidents

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Source)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Run(Record):
    """A training run as lists show it."""

    run_id: str
    """Opaque id, part of every URL about the run."""
    project: str
    """Project that the run belongs to."""
    run: str
    """Name that the user gave the run, unique in the project."""
    state: RunState
    """State that the writer reported last: running, finished or failed."""
    condition: Newer[Condition] = None
    """The state; a running run is silent or stuck while an alert says so."""
    attempt: int
    """Current attempt; the first is 1."""
    num_blocks: int
    """Depth of the model in the current attempt."""
    tags: list[str]
    """Words for filters."""
    created_at: datetime
    """Time at which the run was first registered."""
    updated_at: datetime
    """Time at which the run was last seen."""
    last_step: int | None
    """Largest stored step that no later attempt hides; null before the first frame."""
    num_frames: int
    """Number of stored frames, in all attempts."""
    loss: float | None
    """Last loss; null if there is none or it is not finite."""
    process_step: int | None
    """Last step that the training process reported, sampled or not; null before its first report."""
    stepped_at: datetime | None
    """Time at which the process first reported that step. A run is stuck if this is old and `updated_at` is not."""
    open_alerts: int
    """Number of pending and firing alerts."""
    alerts_at_end: int
    """Number of warnings and critical alerts that were firing when their attempt was finished or failed. An attempt that a
    later one continued does not count."""

    _source: Source | None = PrivateAttr(None)

    def model_post_init(self, context: Any) -> None:
        self._source = context

    def _repr_html_(self) -> str:
        """Show the run's facts, its incidents and its heat map. A notebook that shows the run requests the latter two."""
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
        return f"<div>{name}{display.table(facts)}{self._incidents_html()}{self._heatmap_html()}</div>"

    def _incidents_html(self) -> str:
        """The newest incident with its advice, and the others in a table."""
        if self._source is None or self.last_step is None:
            return ""
        try:
            incidents = self._source.incidents(self.run_id)
        except TsemonError as error:
            return f"<p>No incidents: {escape(str(error))}</p>"
        if not incidents:
            return ""
        newest, *earlier = incidents
        return newest._repr_html_() + (display.records(Incident, earlier) if earlier else "")

    def _heatmap_html(self) -> str:
        metric = self._shown_metric()
        if self._source is None or self.last_step is None or metric is None:
            return ""
        try:
            return self._source.heatmap(self.run_id, metric)._repr_html_()
        except TsemonError as error:
            return f"<p>No heat map of {escape(metric)}: {escape(str(error))}</p>"

    def _shown_metric(self) -> str | None:
        return FIRST_CHOICE


class Zoom(Record):
    """A request for more samples of a run."""

    run_id: str
    """Run that was asked."""
    attempt: int
    """Attempt whose process gets the request with the response to its next frame or heartbeat."""
    after_step: int | None
    """Largest stored step at the request; the requested samples come later. Null before the first frame."""


class Attempt(Record):
    """One start of the training process."""

    attempt: int
    """Number of the attempt, from 1."""
    resume_step: int | None
    """Step that the attempt started at; null for the start of the run."""
    started_at: datetime
    """Time at which the attempt was registered."""
    state: Literal["running", "finished", "failed", "replaced"]
    """`replaced`: a later attempt began, and the process was silent."""
    is_live: bool
    """True if the process runs and sent something in the last 95 s. Several attempts may be live at a time."""


class Recorded(Record):
    """Metrics that the run has frames for."""

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
    """Time at which the writer made the frame, in seconds since 1970, UTC."""
    scalars: dict[str, float | None]
    """Its numbers; null where they are not finite."""


Line = Annotated[str, Field(pattern=f"^({NAME})?$", max_length=128)]


class OwnQuantity(Record):
    """A metric of the user's own."""

    axis: Axis
    """activation: a value per block and one for the input of each stack. block: one per block. run: one per step."""
    title: Line = ""
    """Its meaning in a few words."""
    equation: Line = ""
    """How it is defined."""
    unit: Line = "1"
    """Its unit."""
    low: FiniteFloat | None = None
    """Smallest possible value; null if there is no bound."""
    high: FiniteFloat | None = None
    """Largest possible value; null if there is no bound."""
    log_scale: bool = False
    """True if charts should use a logarithmic scale."""


class Stack(Record):
    """Blocks that follow each other, such as an encoder."""

    name: str
    """Short name; empty if the model has one stack and it was given no name."""
    blocks: int
    """Number of blocks."""
    first_block: int
    """Index of its first block, which is also its first layer in metrics with one value per block."""
    first_state: int
    """Index of its first layer in metrics of activations: the input of its first block."""


class RunDetail(Run):
    """A training run with all that is known about it besides its frames."""

    blocks: list[str]
    """Names of the model's blocks in depth order, as the current attempt registered them."""
    stacks: list[Stack] = Field([])
    """Stacks that the blocks form, in the order of layers; at least one."""
    frozen_blocks: list[int]
    """Indexes of the blocks that are intentionally not trained."""
    not_measured: dict[str, str] = Field({})
    """Why metrics are not measured, by name, as the current attempt's writers said last."""
    config: dict[str, Any]
    """Configuration that the user registered with the run."""
    quantities: dict[str, OwnQuantity] = Field({})
    """Metrics of the user's own, by name."""
    attempts: list[Attempt]
    """All attempts, oldest first."""
    metrics: Recorded
    """Metrics that can be asked for."""
    latest: Latest | None
    """Numbers of the newest frame; null before the first frame."""
    default_metric: str | None = None
    """Metric with layers to show first: `token_diversity`; in a run without it, the metric that is nearest to a threshold
    of a built-in rule. Raw token similarity is never shown first, because it says little by itself. Null if there is no
    other metric."""
    unevaluated_frames: int = Field(0)
    """Number of stored frames that no rule has read, because they came too late or because the rules failed."""

    @property
    def depth(self) -> Stacks:
        """The stacks, with the functions that name a layer."""
        return Stacks.of(self.num_blocks, [stack.model_dump() for stack in self.stacks])

    def layer_name(self, metric: str, layer: int) -> str:
        """Return the name of a layer of the metric: "decoder 3", or "3" in a model with one stack."""
        return self.depth.label(layer, self.num_layers(metric))

    def layer(self, metric: str, stack: str, index: int) -> int:
        """The layer of the metric at `index` of a stack; -1 is the stack's last layer. Raises UnknownLayer."""
        return self.depth.number(stack, index, self.num_layers(metric))

    def num_layers(self, metric: str) -> int:
        """How many layers the metric has, or blocks if it is recorded per head only; 0 if it has none."""
        return self.metrics.layers.get(metric) or self.metrics.heads.get(metric, (0, 0))[0]

    def _shown_metric(self) -> str | None:
        return self.default_metric


class RunPage(Record):
    """A part of the list of runs."""

    runs: list[Run]
    """The runs, in the order that was asked for."""
    next_cursor: str | None
    """`cursor` of the next page; null on the last page."""
    total: Newer[int] = None
    """Number of runs that match, on all pages together; counted up to 10,000."""


class TagUse(Record):
    """A tag, and how many runs have it."""

    tag: str
    """The tag."""
    runs: int
    """Number of runs with the tag."""


class Tags(Record):
    """The tags of runs."""

    tags: list[TagUse]
    """Up to 200 tags, the most used first."""


class LossLine(Record):
    """The loss over steps, in a few buckets."""

    step: list[int]
    """Middle between the first and the last sample of each bucket, ascending."""
    mean: list[float | None]
    """Mean of the finite values of each bucket; null if there is none."""


class Worst(Record):
    """The layer to look at first."""

    metric: str
    """Metric that shows it: `nonfinite`, `nonfinite_entries`, a metric that is not finite, or else the metric of `rule`,
    which may be an expression such as `update_norm / param_norm`."""
    layer: int
    """Index of the layer, from 0."""
    label: str | None = None
    """Name of the layer in a model with several stacks, such as `decoder 3`; null if there is one stack."""
    value: float | None
    """Value of the metric in that layer; null if it is not finite."""
    rule: str | None = None
    """Built-in rule that the layer is nearest to; null if the layer is not finite."""
    threshold: float | None = None
    """Threshold of the rule for this metric."""
    decades: float | None = None
    """Distance from the threshold in decades, of the odds for a share between 0 and 1; negative beyond the threshold."""


class Glance(Record):
    """A run at a glance."""

    run_id: str
    """Id of the run."""
    loss: LossLine | None
    """Its loss; null if the run has none."""
    worst: Worst | None
    """Worst layer at the newest step; null if no metric shows one."""


class Glances(Record):
    """Several runs at a glance."""

    glances: list[Glance]
    """In the order that was asked for, without runs that do not exist."""


class Registered(Record):
    """Where to send frames."""

    run_id: str
    """Id of the run, part of every URL about it."""
    run: str
    """Name of the run, another one than asked for if `on_conflict` is `new` and a live process has that name."""
    attempt: int
    """Number of the attempt, sent with every body of frames."""
    live_attempts: list[int]
    """Other attempts of the run whose processes are alive."""
    accepts: list[str]
    """Content types of the bodies of frames that the server reads."""


class ShownSpool(Record):
    """One spool of a run."""

    folder: str
    """Folder of the spool, below the folder that the server shows."""
    attempt: int
    """Attempt whose frames the spool holds."""
    writer: str
    """Writer of the spool."""
    num_frames: int
    """Number of frames read from the spool so far."""
    num_refused: int
    """Number of frames that the wire format does not allow, and that are left out."""
    damaged: list[str]
    """Segments with a torn or altered record. The frames after that record are lost."""


class ShownSpools(Record):
    """All spools of a run."""

    spools: list[ShownSpool]
    """The spools, oldest first."""
