"""The same answers with a row per value, for programs that want tables: Grafana's Infinity, spreadsheets, jq."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tsemon.catalogue import LAYERED
from tsemon.errors import UnknownRun
from tsemon_answers.rows import (
    HeatmapRow,
    HeatmapRows,
    HeatmapRowsQuery,
    MetricRow,
    MetricRows,
    MetricRowsQuery,
    RunRow,
    RunRows,
    RunRowsQuery,
    SeriesRow,
    SeriesRows,
    SeriesRowsQuery,
)
from tsemon_answers.runs import Run, RunDetail, RunFilter
from tsemon_answers.series import ComparedRun, CompareQuery, HeatmapQuery
from tsemon_server.services.queries import service
from tsemon_server.store import Store

LOWEST = 1e-13
"""Values below this are shown as this on a log scale, as the rules do for log odds. A layer that collapsed has 0."""


def run_rows(store: Store, asked: RunRowsQuery) -> RunRows:
    """Runs as rows, the latest first."""
    runs: Sequence[Run]
    if asked.run_ids is not None:
        runs = [described(store, run_id, asked.project) for run_id in asked.run_ids[: asked.limit]]
    else:
        with store.read() as reader:
            runs = reader.runs.find(RunFilter(project=asked.project), order="-updated", limit=asked.limit)
    about = [{name: getattr(run, name) for name in Run.model_fields} for run in runs]
    return RunRows(rows=[RunRow(label=_label(run), **fields) for run, fields in zip(runs, about, strict=True)])


def metric_rows(store: Store, asked: MetricRowsQuery) -> MetricRows:
    """What one or several runs have recorded, as rows."""
    with store.read() as reader:
        recorded = [reader.runs.detail(run_id).metrics for run_id in asked.run_ids]
    names = {name for metrics in recorded for name in getattr(metrics, asked.kind)}
    return MetricRows(rows=[MetricRow(metric=name) for name in sorted(names)])


def series_rows(store: Store, asked: SeriesRowsQuery) -> SeriesRows:
    """One metric of one or several runs over steps, as rows; none without a run."""
    if not asked.run_ids:
        return SeriesRows(rows=[])
    comparison = service.compare(store, CompareQuery(**dict(asked)))
    on_scale = _scale(asked)
    rows = [
        SeriesRow(
            step=step,
            run_id=run.run_id,
            label=_label(run),
            min=on_scale(least),
            mean=on_scale(mean),
            max=on_scale(most),
            nonfinite=num_nonfinite,
        )
        for run in comparison.runs
        for step, least, mean, most, num_nonfinite in zip(
            run.step, run.min, run.mean, run.max, run.nonfinite, strict=True
        )
    ]
    return SeriesRows(rows=rows)


def heatmap_rows(store: Store, asked: HeatmapRowsQuery) -> HeatmapRows:
    """One metric over steps and layers, as rows; none without a run."""
    if not asked.run_id:
        return HeatmapRows(rows=[])
    heatmap = service.heatmap(store, asked.run_id, HeatmapQuery(**dict(asked)))
    on_scale = _scale(asked)
    rows = [
        HeatmapRow(step=step, layer=layer, value=on_scale(value))
        for step, values in zip(heatmap.step, heatmap.values, strict=True)
        for layer, value in enumerate(values)
    ]
    return HeatmapRows(rows=rows)


def _scale(asked: SeriesRowsQuery | HeatmapRowsQuery) -> Callable[[float | None], float | None]:
    metric = LAYERED.get(asked.metric)
    if asked.scale == "linear" or metric is None or not metric.log_scale:
        return lambda value: value
    return lambda value: math.log10(max(value, LOWEST)) if value is not None and value >= 0 else None


def described(store: Store, run_id: str, project: str | None) -> RunDetail:
    """The run. One of another project is not there: whoever may see that project alone is not told more."""
    with store.read() as reader:
        found = reader.runs.detail(run_id)
    if project is not None and found.project != project:
        raise UnknownRun(f"no run has the id {run_id!r} in project {project!r}")
    return found


def _label(run: Run | ComparedRun) -> str:
    return f"{run.project}/{run.run}"
