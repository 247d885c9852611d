"""The routes that read."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Generator
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tsemon_answers.alerts import Alert, AlertPage, AlertPageQuery, NotificationPage, NotificationsQuery
from tsemon_answers.record import Record
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
from tsemon_answers.runs import Glances, GlancesQuery, RunDetail, RunPage, RunPageQuery, Tags, TagsQuery
from tsemon_answers.series import (
    CompareQuery,
    Comparison,
    ExportQuery,
    FrameQuery,
    Heatmap,
    HeatmapQuery,
    RecordedFrame,
    Series,
    SeriesQuery,
)
from tsemon_server.services.queries import frames, glances, rows, service
from tsemon_server.services.queries.export import MEDIA_TYPES
from tsemon_server.store import Store

log = logging.getLogger(__name__)

RunId = Annotated[str, Path(description="Id of the run, as the registration answered it.", max_length=64)]
LARGE_AT_ONCE = 4
"""Heat maps and comparisons that are made at the same time: each takes ten times its size meanwhile."""

TABLES = {media_type.partition(";")[0]: {"schema": {"type": "string"}} for media_type in MEDIA_TYPES.values()}
"""What an export may be, for OpenAPI."""


class Overdue(Exception):
    """An answer has not been taken in time."""


class TimedResponse(StreamingResponse):
    """One that is cut off where it is not taken within so many seconds: whoever reads slowly holds what it is made of."""

    def __init__(
        self, parts: Generator[bytes, None, None], within_s: float, media_type: str, headers: dict[str, str]
    ) -> None:
        super().__init__(parts, media_type=media_type, headers=headers)
        self._parts, self._within_s = parts, within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        until = asyncio.get_running_loop().time() + self._within_s

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout_at(until):
                    await send(message)
                    await asyncio.sleep(0)  # where nothing is waited for, the time may be over, too
            except TimeoutError:
                raise Overdue from None

        try:
            await super().__call__(scope, receive, send_in_time)
        except Overdue:
            # The end of the answer is never sent, so that whoever reads it knows that it is not whole.
            log.warning("an export was not taken within %s s and is cut off", self._within_s)
            self._parts.close()  # and with it what it reads of the database


def make_router(store: Store, export_s: float) -> APIRouter:
    """Routes that read `store`; an export may last `export_s`."""
    router = APIRouter(tags=["readers"])
    in_turn = threading.Semaphore(LARGE_AT_ONCE)
    lines = glances.Lines()

    @router.get("/rows/runs")
    def run_rows(asked: Annotated[RunRowsQuery, Query()]) -> RunRows:
        """Runs as rows, the latest first."""
        return rows.run_rows(store, asked)

    @router.get("/rows/metrics")
    def metric_rows(asked: Annotated[MetricRowsQuery, Query()]) -> MetricRows:
        """What one or several runs have recorded, as rows."""
        return rows.metric_rows(store, asked)

    @router.get("/rows/series")
    def series_rows(asked: Annotated[SeriesRowsQuery, Query()]) -> SeriesRows:
        """One metric of one or several runs over steps, as rows."""
        return rows.series_rows(store, asked)

    @router.get("/rows/heatmap")
    def heatmap_rows(asked: Annotated[HeatmapRowsQuery, Query()]) -> HeatmapRows:
        """One metric over steps and layers, as rows."""
        return rows.heatmap_rows(store, asked)

    @router.get("/runs")
    def list_runs(asked: Annotated[RunPageQuery, Query()]) -> RunPage:
        """List runs. One whose place in the order changes between two pages may move past the cursor; all others are
        listed once."""
        return service.list_runs(store, asked)

    @router.get("/tags")
    def list_tags(asked: Annotated[TagsQuery, Query()]) -> Tags:
        """The tags that runs have, the most used first."""
        with store.read() as reader:
            return Tags(tags=reader.tags(asked.project, 200))

    @router.get("/runs/{run_id}")
    def describe_run(run_id: RunId) -> RunDetail:
        """All about one run besides its frames."""
        with store.read() as reader:
            return reader.run_detail(run_id)

    @router.get("/runs/{run_id}/series")
    def series(run_id: RunId, asked: Annotated[SeriesQuery, Query()]) -> Series:
        """One metric over steps."""
        return service.series(store, run_id, asked)

    @router.get("/compare", response_model=Comparison)
    def compare(asked: Annotated[CompareQuery, Query()]) -> Response:
        """One metric of several runs over the same buckets of steps."""
        with in_turn:
            return _as_json(service.compare(store, asked))

    @router.get("/glances", response_model=Glances)
    def glance(asked: Annotated[GlancesQuery, Query()]) -> Response:
        """Runs at a glance: where the loss of each goes, and which layer is worst."""
        return _as_json(glances.glances(store, lines, asked))

    @router.get("/runs/{run_id}/heatmap", response_model=Heatmap)
    def heatmap(run_id: RunId, asked: Annotated[HeatmapQuery, Query()]) -> Response:
        """One metric over steps and layers."""
        with in_turn:
            return _as_json(service.heatmap(store, run_id, asked))

    @router.get("/runs/{run_id}/frame", response_model=RecordedFrame)
    def frame(run_id: RunId, asked: Annotated[FrameQuery, Query()]) -> Response:
        """All that was measured at one step."""
        return _as_json(frames.frame(store, run_id, asked))

    @router.get("/runs/{run_id}/export", response_class=StreamingResponse, responses={200: {"content": TABLES}})
    def export(run_id: RunId, asked: Annotated[ExportQuery, Query()]) -> StreamingResponse:
        """All raw samples as a table with a row per value."""
        download = service.export(store, run_id, asked)
        headers = {"Content-Disposition": f'attachment; filename="{download.name}"'}
        return TimedResponse(download.parts, export_s, download.media_type, headers)

    @router.get("/alerts")
    def list_alerts(asked: Annotated[AlertPageQuery, Query()]) -> AlertPage:
        """List alerts, newest first."""
        return service.list_alerts(store, asked)

    @router.get("/alerts/{alert_id}")
    def describe_alert(
        alert_id: Annotated[str, Path(description="Id of the alert, as GET /alerts answered it.", max_length=64)],
    ) -> Alert:
        """One alert."""
        with store.read() as reader:
            return reader.alert(alert_id)

    @router.get("/notifications")
    def list_notifications(asked: Annotated[NotificationsQuery, Query()]) -> NotificationPage:
        """What receivers were told of alerts, and are to be told, newest first."""
        return service.list_notifications(store, asked)

    return router


def _as_json(found: Record) -> Response:
    return Response(found.model_dump_json(), media_type="application/json")
