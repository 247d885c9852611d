"""The same answers with a row per value, for programs that want tables: Grafana's Infinity, spreadsheets, jq.

A panel fills its addresses from variables, so these routes take what variables give: several runs in one text with commas
between them, and an empty text where nobody has typed a step, or chosen a run: that has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from tsemon.errors import InvalidArgument, UnknownRun
from tsemon_server.queries import service
from tsemon_server.store import LARGEST, Record, Run, RunDetail, RunFilter, Store

MAX_RUNS = 20
"""So many a chart can tell apart."""

Runs = Annotated[
    list[str],
    Query(
        max_length=MAX_RUNS, description="The ids of up to 20 runs, each as `run=`, or in one text with commas between."
    ),
]
Step = Annotated[int, Field(ge=0, le=2**53)] | Literal[""] | None
FromStep = Annotated[Step, Query(description="The first step, included; empty is the run's first.")]
ToStep = Annotated[Step, Query(description="The last step, included; empty is the run's last.")]


class RunRow(Run):
    """A run."""

    label: str
    """Its project and name, as in `pretrain/gpt`: unique, and fit for a legend."""


class RunRows(Record):
    """Some of the runs."""

    rows: list[RunRow]
    """In the order that was asked for, else the latest first."""


class MetricRow(Record):
    """A metric that can be asked for."""

    metric: str
    """Its name."""


class MetricRows(Record):
    """What runs have recorded."""

    rows: list[MetricRow]
    """By name; what any of the runs has."""


class SeriesRow(Record):
    """A bucket of one run."""

    step: int
    """The middle between the first and the last sample of the bucket; per run ascending."""
    run_id: str
    """The run's id."""
    label: str
    """Its project and name."""
    min: float | None
    """The least finite value; null where there is none."""
    mean: float | None
    """The mean of the finite values; null where there is none."""
    max: float | None
    """The largest finite value; null where there is none."""
    nonfinite: int
    """How many samples of the bucket are NaN or infinite."""


class SeriesRows(Record):
    """One metric of one or several runs over the same buckets of steps."""

    rows: list[SeriesRow]
    """Run after run, in the order that was asked for."""


class HeatmapRow(Record):
    """One layer in one span of steps."""

    step: int
    """The middle between the first and the last sample of the span."""
    layer: int
    """The layer, from 0."""
    value: float | None
    """The mean of its finite values; null where there is none."""


class HeatmapRows(Record):
    """One metric over steps and layers."""

    rows: list[HeatmapRow]
    """By step, and within a step by layer; each step has all layers."""


def make_router(store: Store) -> APIRouter:
    """Routes that read `store`."""
    router = APIRouter(prefix="/rows")

    @router.get("/runs")
    def run_rows(
        run: Annotated[
            list[str] | None,
            Query(
                max_length=MAX_RUNS, description="Only these: ids, each as `run=`, or in one text with commas between."
            ),
        ] = None,
        project: Annotated[str | None, Query(description="Only runs of this project.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="At most so many.")] = 200,
    ) -> RunRows:
        """Runs as rows, the latest first."""
        if run is not None:
            return rows_of_runs([described(store, run_id, project) for run_id in ids_in(run)[:limit]])
        with store.read() as reader:
            return rows_of_runs(reader.runs.find(RunFilter(project=project), order="-updated", limit=limit))

    @router.get("/metrics")
    def metric_rows(
        run: Runs,
        kind: Annotated[
            Literal["scalars", "layers", "heads"],
            Query(description="Those with one number per step, with one per layer, or with one per head."),
        ],
    ) -> MetricRows:
        """What one or several runs have recorded, as rows."""
        return rows_of_metrics([service.describe_run(store, run_id) for run_id in ids_in(run)], kind)

    @router.get("/series")
    def series_rows(
        run: Runs,
        metric: Annotated[str, Query(max_length=128, description="The metric's name.")],
        layer: Annotated[
            int | None,
            Query(
                le=LARGEST, description="The layer, for a metric with a value per layer; -1 is the last of each run."
            ),
        ] = None,
        head: Annotated[
            int | None, Query(le=LARGEST, description="The head, for a metric that is recorded per head.")
        ] = None,
        from_step: FromStep = None,
        to_step: ToStep = None,
        points: Annotated[int, Query(ge=3, le=10_000, description="At most so many buckets per run.")] = 1000,
    ) -> SeriesRows:
        """One metric of one or several runs over steps, as rows."""
        run_ids = ids_in(run)
        if not run_ids:
            return SeriesRows(rows=[])
        return rows_of_comparison(
            service.compare(
                store,
                run_ids,
                metric,
                layer=layer,
                head=head,
                from_step=step_in(from_step),
                to_step=step_in(to_step),
                points=points,
            )
        )

    @router.get("/heatmap")
    def heatmap_rows(
        run: Annotated[str, Query(max_length=64, description="The id of the run.")],
        metric: Annotated[str, Query(max_length=128, description="The metric's name.")],
        from_step: FromStep = None,
        to_step: ToStep = None,
        columns: Annotated[int, Query(ge=1, le=2000, description="At most so many spans of steps.")] = 200,
    ) -> HeatmapRows:
        """One metric over steps and layers, as rows."""
        if not run:
            return HeatmapRows(rows=[])
        return rows_of_heatmap(
            service.heatmap(
                store,
                run,
                metric,
                from_step=step_in(from_step),
                to_step=step_in(to_step),
                columns=columns,
                attempt=None,
            )
        )

    return router


def ids_in(texts: list[str]) -> list[str]:
    """The runs in the order in which they are named. Raises InvalidArgument if there are too many."""
    run_ids = [run_id for text in texts for run_id in text.split(",") if run_id]
    if len(run_ids) > MAX_RUNS:
        raise InvalidArgument(f"expected the ids of up to {MAX_RUNS} runs as `run`, got {len(run_ids)}")
    return run_ids


def step_in(given: int | Literal[""] | None) -> int | None:
    return None if given == "" else given


def described(store: Store, run_id: str, project: str | None) -> RunDetail:
    """The run. One of another project is not there: whoever may see that project alone is not told more."""
    found = service.describe_run(store, run_id)
    if project is not None and found.project != project:
        raise UnknownRun(f"no run has the id {run_id!r} in project {project!r}")
    return found


def rows_of_runs(runs: Sequence[Run]) -> RunRows:
    return RunRows(
        rows=[
            RunRow(label=f"{run.project}/{run.run}", **{name: getattr(run, name) for name in Run.model_fields})
            for run in runs
        ]
    )


def rows_of_metrics(runs: Sequence[RunDetail], kind: Literal["scalars", "layers", "heads"]) -> MetricRows:
    names = {name for run in runs for name in getattr(run.metrics, kind)}
    return MetricRows(rows=[MetricRow(metric=name) for name in sorted(names)])


def rows_of_comparison(comparison: service.Comparison) -> SeriesRows:
    return SeriesRows(
        rows=[
            SeriesRow(
                step=step,
                run_id=run.run_id,
                label=f"{run.project}/{run.run}",
                min=least,
                mean=mean,
                max=most,
                nonfinite=num_nonfinite,
            )
            for run in comparison.runs
            for step, least, mean, most, num_nonfinite in zip(
                run.step, run.min, run.mean, run.max, run.nonfinite, strict=True
            )
        ]
    )


def rows_of_heatmap(heatmap: service.Heatmap) -> HeatmapRows:
    return HeatmapRows(
        rows=[
            HeatmapRow(step=step, layer=layer, value=value)
            for step, values in zip(heatmap.step, heatmap.values, strict=True)
            for layer, value in enumerate(values)
        ]
    )
