"""The values of metrics: over steps, over steps and layers, of several runs, of one step, and all of them as a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from tsemon.catalogue import LAYERED
from tsemon_answers import display
from tsemon_answers.record import Newer, OfAttempt, OfEntry, OfMetric, Query, Record, Span
from tsemon_answers.tables import Column, Table

Along = Literal["step", "time", "tokens"]
ExportFormat = Literal["csv", "parquet"]
Points = Annotated[int, Field(ge=3, le=10_000)]
Columns = Annotated[int, Field(ge=1, le=2000)]
MAX_COMPARED = 20
"""Maximum number of runs in one chart that a reader can tell apart."""


class SeriesQuery(OfAttempt, Span, OfEntry):
    """One metric over steps, as min, mean and max of each bucket of steps; each step is a bucket if all fit.

    Raises UnknownRun, UnknownMetric, UnknownLayer, UnknownAttempt, InvalidRange.
    """

    points: Points = 1000
    """Maximum number of buckets."""


class HeatmapQuery(OfAttempt, Span, OfMetric):
    """One metric over layers and steps: the mean of each layer in each span of steps.

    Raises UnknownRun, UnknownMetric, UnknownAttempt, InvalidRange.
    """

    columns: Columns = 200
    """Maximum number of spans of steps."""
    extremes: bool = False
    """Also return the value of each cell that is farthest from its mean, and how many values are not finite."""


class _OfRuns(Query):
    run_ids: Annotated[Sequence[str], Field(alias="run", min_length=1, max_length=MAX_COMPARED)] = Field(kw_only=False)
    """Ids of up to 20 runs."""


class CompareQuery(Span, OfEntry, _OfRuns):
    """One metric of several runs over the same buckets of steps. Layer -1 is the last layer of each run.

    A run without the metric is empty. If every run lacks the metric, raises UnknownMetric or UnknownLayer; otherwise
    raises UnknownRun, InvalidRange.
    """

    points: Points = 1000
    """Maximum number of buckets per run."""
    along: Along = "step"
    """Meaning of `x`: the step, seconds since the run's first frame, or its scalar `tokens`."""


class FrameQuery(OfAttempt):
    """All values that were recorded at one step.

    Raises UnknownRun, UnknownAttempt, UnknownFrame if nothing is recorded.
    """

    step: Annotated[int | None, Field(ge=0, le=2**53)] = Field(None, kw_only=False)
    """Return the frame nearest to this step; if absent, the newest frame."""


class ExportFilter(OfAttempt, Span):
    """Write all raw samples to a file that ends in .parquet or .csv, a row per value. The file appears when it is complete.

    Returns the path. Raises UnknownRun, UnknownMetric, UnknownAttempt, InvalidRange, MissingPackage if the server cannot
    make Parquet, Busy.
    """

    metrics: Annotated[Sequence[str], Field(alias="metric", max_length=1000)] = ()
    """Only these metrics; may be given several times."""


class ExportQuery(ExportFilter):
    """All raw samples as a table with a row per value."""

    format: ExportFormat = "csv"
    """csv, or parquet if the server has pyarrow."""


class Buckets(Record):
    """Samples over steps, in buckets if there are more samples than points. All lists have one entry per bucket."""

    step: list[int]
    """Middle between the first and the last sample of each bucket, ascending. Each bucket is one step if all fit."""
    min: list[float | None]
    """Least finite value of each bucket; null if there is none."""
    mean: list[float | None]
    """Mean of the finite values of each bucket; null if there is none."""
    max: list[float | None]
    """Largest finite value of each bucket; null if there is none."""
    nonfinite: list[int]
    """Number of samples of each bucket that are NaN or infinite."""
    damaged: int
    """Number of samples in the range that are left out because their storage is damaged."""


class Series(Buckets, Table):
    """One metric over steps."""

    metric: str
    """Name of the metric."""
    layer: int | None
    """Index of the layer; null for a metric of the whole run."""
    head: int | None
    """Index of the head; null for the layer as a whole."""

    def columns(self) -> list[Column]:
        """A row per bucket: step, min, mean, max, nonfinite."""
        return _bucket_columns([self])


class ComparedRun(Buckets):
    """One of the compared runs."""

    run_id: str
    """Its id."""
    project: str
    """Its project."""
    run: str
    """Its name."""
    x: list[float | None] = Field([])
    """Position of each bucket on the axis that was asked for; null if it is not known."""


class Comparison(Record, Table):
    """One metric of several runs over the same buckets of steps."""

    metric: str
    """Name of the metric."""
    layer: int | None
    """Index of the layer; null for a metric of the whole run."""
    head: int | None
    """Index of the head; null for the layer as a whole."""
    along: Along = "step"
    """Meaning of `x`: the step, seconds since the run's first frame, or tokens."""
    runs: list[ComparedRun]
    """The runs in the order that was asked for; runs without the metric have no samples."""

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
    """Name of the metric."""
    step: list[int]
    """Middle between the first and the last sample of each column, ascending."""
    layers: int
    """Number of layers of the metric."""
    values: list[list[float | None]]
    """Per column the mean of the finite values of each layer; null if there is none."""
    samples: Newer[list[int]] = None
    """Number of samples in each column."""
    farthest: list[list[float | None]] | None = None
    """Per column the finite value of each layer that is farthest from its mean; null unless `extremes` was asked for."""
    nonfinite: list[list[int]] | None = None
    """Per column the number of samples of each layer that are NaN or infinite; null unless `extremes` was asked for."""
    damaged: int
    """Number of samples in the range that are left out because their storage is damaged."""

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
    """All values that were recorded at one step."""

    attempt: int
    """Attempt that recorded the frame."""
    step: int
    """Its step."""
    time: float
    """Time at which the writer made the frame, in seconds since 1970, UTC."""
    scalars: dict[str, float | None]
    """Metrics with one number; null if it is not finite."""
    layers: dict[str, list[float | None]]
    """Metrics with a number per layer, from the first to the last; null where it is not finite."""
    heads: dict[str, list[list[float | None]]]
    """Metrics with a number per head, block by block; null where it is not finite."""

    def columns(self) -> list[Column]:
        """A row per value: metric, layer, head, value; layer and head are empty if there is none."""
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
