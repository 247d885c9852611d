"""The same answers with a row per value, for programs that want tables."""

from __future__ import annotations

from tsemon.wire import API
from tsemon_answers.rows import (
    HeatmapRows,
    HeatmapRowsQuery,
    MetricRows,
    MetricRowsQuery,
    RunRows,
    RunRowsQuery,
    SeriesRows,
    SeriesRowsQuery,
)
from tsemon_server.access.needs import needs
from tsemon_server.routes.signature import Asked, TheStore, api_router
from tsemon_server.services.queries import rows

router = api_router("readers", f"{API}/rows")


@router.get("/runs")
@needs("read", of="project")
def list_run_rows(asked: Asked[RunRowsQuery], store: TheStore) -> RunRows:
    """Runs as rows, the latest first."""
    return rows.run_rows(store, asked)


@router.get("/metrics")
@needs("read", of="runs")
def list_metric_rows(asked: Asked[MetricRowsQuery], store: TheStore) -> MetricRows:
    """What one or several runs have recorded, as rows."""
    return rows.metric_rows(store, asked)


@router.get("/series")
@needs("read", of="runs")
def read_series_rows(asked: Asked[SeriesRowsQuery], store: TheStore) -> SeriesRows:
    """One metric of one or several runs over steps, as rows."""
    return rows.series_rows(store, asked)


@router.get("/heatmap")
@needs("read", of="runs")
def read_heatmap_rows(asked: Asked[HeatmapRowsQuery], store: TheStore) -> HeatmapRows:
    """One metric over steps and layers, as rows."""
    return rows.heatmap_rows(store, asked)
