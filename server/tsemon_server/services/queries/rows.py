"""The same answers with a row per value, for programs that want tables: Grafana's Infinity, spreadsheets, jq."""

from __future__ import annotations

from collections.abc import Sequence

from tsemon.errors import UnknownRun
from tsemon_answers.rows import (
    HeatmapRow,
    HeatmapRows,
    HeatmapRowsQuery,
    MetricRow,
    MetricRows,
    MetricRowsQuery,
    RecordedAs,
    RunRow,
    RunRows,
    RunRowsQuery,
    SeriesRow,
    SeriesRows,
    SeriesRowsQuery,
)
from tsemon_answers.runs import Run, RunDetail, RunFilter
from tsemon_answers.series import CompareQuery, Comparison, Heatmap, HeatmapQuery
from tsemon_server.services.queries import service
from tsemon_server.store import Store


def run_rows(store: Store, asked: RunRowsQuery) -> RunRows:
    """Runs as rows, the latest first."""
    if asked.run_ids is not None:
        return rows_of_runs([described(store, run_id, asked.project) for run_id in asked.run_ids[: asked.limit]])
    with store.read() as reader:
        return rows_of_runs(reader.runs.find(RunFilter(project=asked.project), order="-updated", limit=asked.limit))


def metric_rows(store: Store, asked: MetricRowsQuery) -> MetricRows:
    """What one or several runs have recorded, as rows."""
    with store.read() as reader:
        return rows_of_metrics([reader.runs.detail(run_id) for run_id in asked.run_ids], asked.kind)


def series_rows(store: Store, asked: SeriesRowsQuery) -> SeriesRows:
    """One metric of one or several runs over steps, as rows; none without a run."""
    if not asked.run_ids:
        return SeriesRows(rows=[])
    return rows_of_comparison(service.compare(store, CompareQuery(**dict(asked))))


def heatmap_rows(store: Store, asked: HeatmapRowsQuery) -> HeatmapRows:
    """One metric over steps and layers, as rows; none without a run."""
    if not asked.run_id:
        return HeatmapRows(rows=[])
    return rows_of_heatmap(service.heatmap(store, asked.run_id, HeatmapQuery(**dict(asked))))


def described(store: Store, run_id: str, project: str | None) -> RunDetail:
    """The run. One of another project is not there: whoever may see that project alone is not told more."""
    with store.read() as reader:
        found = reader.runs.detail(run_id)
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


def rows_of_metrics(runs: Sequence[RunDetail], kind: RecordedAs) -> MetricRows:
    names = {name for run in runs for name in getattr(run.metrics, kind)}
    return MetricRows(rows=[MetricRow(metric=name) for name in sorted(names)])


def rows_of_comparison(comparison: Comparison) -> SeriesRows:
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


def rows_of_heatmap(heatmap: Heatmap) -> HeatmapRows:
    return HeatmapRows(
        rows=[
            HeatmapRow(step=step, layer=layer, value=value)
            for step, values in zip(heatmap.step, heatmap.values, strict=True)
            for layer, value in enumerate(values)
        ]
    )
