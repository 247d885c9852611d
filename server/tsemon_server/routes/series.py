"""The values of metrics: over steps, over steps and layers, of several runs, and of one step."""

from __future__ import annotations

from fastapi import Response

from tsemon_answers.series import (
    CompareQuery,
    Comparison,
    FrameQuery,
    Heatmap,
    HeatmapQuery,
    RecordedFrame,
    Series,
    SeriesQuery,
)
from tsemon_server.access.needs import needs
from tsemon_server.routes.signature import Asked, RunId, TheLargeCharts, TheStore, api_router, as_json
from tsemon_server.services.queries import frames, service

router = api_router("readers")


@router.get("/runs/{run_id}/series")
@needs("read", of="run")
def read_series(run_id: RunId, asked: Asked[SeriesQuery], store: TheStore) -> Series:
    """One metric over steps."""
    return service.series(store, run_id, asked)


@router.get("/compare", response_model=Comparison)
@needs("read", of="runs")
def compare_runs(asked: Asked[CompareQuery], store: TheStore, in_turn: TheLargeCharts) -> Response:
    """One metric of several runs over the same buckets of steps."""
    with in_turn:
        return as_json(service.compare(store, asked))


@router.get("/runs/{run_id}/heatmap", response_model=Heatmap)
@needs("read", of="run")
def read_heatmap(run_id: RunId, asked: Asked[HeatmapQuery], store: TheStore, in_turn: TheLargeCharts) -> Response:
    """One metric over steps and layers."""
    with in_turn:
        return as_json(service.heatmap(store, run_id, asked))


@router.get("/runs/{run_id}/frame", response_model=RecordedFrame)
@needs("read", of="run")
def read_frame(run_id: RunId, asked: Asked[FrameQuery], store: TheStore) -> Response:
    """All that was measured at one step."""
    return as_json(frames.frame(store, run_id, asked))
