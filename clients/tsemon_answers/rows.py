"""The same answers with a row per value, for programs that want tables: Grafana's Infinity, spreadsheets, jq.

A panel fills its addresses from variables, so these questions accept what variables give: several runs in one text with
commas between them, and an empty text if nobody has typed a step or chosen a run, which has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from tsemon.errors import InvalidArgument
from tsemon_answers.record import OfEntry, OfMetric, OfProject, Query, Record
from tsemon_answers.runs import Run
from tsemon_answers.series import MAX_COMPARED, Columns, Points

RecordedAs = Literal["scalars", "layers", "heads"]


def _ids_in(texts: Sequence[str] | None) -> list[str] | None:
    """Split texts with commas into ids, in the order in which they come. Raises InvalidArgument if there are too many."""
    run_ids = [run_id for text in texts or () for run_id in text.split(",") if run_id]
    if len(run_ids) > MAX_COMPARED:
        raise InvalidArgument(f"expected the ids of up to {MAX_COMPARED} runs as `run`, got {len(run_ids)}")
    return None if texts is None else run_ids


RunIds = Annotated[list[str], Field(max_length=MAX_COMPARED), AfterValidator(_ids_in)]
Step = Annotated[
    int | None,
    Field(ge=0, le=2**53),
    BeforeValidator(lambda given: None if given == "" else given),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 2**53},
                {"const": "", "type": "string"},
                {"type": "null"},
            ]
        }
    ),
]


class RunRowsQuery(OfProject):
    """Runs as rows."""

    run_ids: Annotated[list[str] | None, Field(alias="run", max_length=MAX_COMPARED), AfterValidator(_ids_in)] = None
    """Only these runs: ids, each as `run=`, or in one text with commas between them."""
    limit: Annotated[int, Field(ge=1, le=1000)] = 200
    """Maximum number of rows."""


class MetricRowsQuery(Query):
    """Recorded metrics as rows."""

    run_ids: Annotated[RunIds, Field(alias="run")]
    """Ids of up to 20 runs, each as `run=`, or in one text with commas between them."""
    kind: RecordedAs
    """Metrics with one number per step, with one per layer, or with one per head."""


class _Span(Query):
    from_step: Step = None
    """First step, inclusive; empty is the run's first."""
    to_step: Step = None
    """Last step, inclusive; empty is the run's last."""


class _Scaled(Query):
    scale: Literal["linear", "catalogue"] = "linear"
    """`catalogue`: log10 of the values if the catalogue shows the metric on a log scale, and -13 below 1e-13."""


class SeriesRowsQuery(_Scaled, _Span, OfEntry):
    """One metric of one or several runs over steps, as rows."""

    run_ids: Annotated[RunIds, Field(alias="run")]
    """Ids of up to 20 runs, each as `run=`, or in one text with commas between them."""
    points: Points = 1000
    """Maximum number of buckets per run."""


class HeatmapRowsQuery(_Scaled, _Span, OfMetric):
    """One metric over steps and layers, as rows."""

    run_id: Annotated[str, Field(alias="run", max_length=64)]
    """Id of the run."""
    columns: Columns = 200
    """Maximum number of spans of steps."""


class RunRow(Run):
    """A run."""

    label: str
    """Project and name of the run, as in `pretrain/gpt`: unique, and fit for a legend."""


class RunRows(Record):
    """A part of the runs."""

    rows: list[RunRow]
    """In the order that was asked for, otherwise the latest first."""


class MetricRow(Record):
    """A metric that can be asked for."""

    metric: str
    """Name of the metric."""


class MetricRows(Record):
    """Metrics that runs have recorded."""

    rows: list[MetricRow]
    """By name, every metric that any of the runs has."""


class SeriesRow(Record):
    """A bucket of one run."""

    step: int
    """Middle between the first and the last sample of the bucket; ascending per run."""
    run_id: str
    """Id of the run."""
    label: str
    """Project and name of the run."""
    min: float | None
    """Least finite value; null if there is none."""
    mean: float | None
    """Mean of the finite values; null if there is none."""
    max: float | None
    """Largest finite value; null if there is none."""
    nonfinite: int
    """Number of samples of the bucket that are NaN or infinite."""


class SeriesRows(Record):
    """One metric of one or several runs over the same buckets of steps."""

    rows: list[SeriesRow]
    """Run after run, in the order that was asked for."""


class HeatmapRow(Record):
    """One layer in one span of steps."""

    step: int
    """Middle between the first and the last sample of the span."""
    layer: int
    """Index of the layer, from 0."""
    value: float | None
    """Mean of its finite values; null if there is none."""


class HeatmapRows(Record):
    """One metric over steps and layers."""

    rows: list[HeatmapRow]
    """By step, and within a step by layer; each step has all layers."""
