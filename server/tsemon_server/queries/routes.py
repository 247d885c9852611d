"""The routes that read."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import StreamingResponse

from tsemon.wire import AlertState, RunState
from tsemon_server.queries import service
from tsemon_server.queries.export import ExportFormat
from tsemon_server.store import Alert, DeliveryStatus, RunDetail, RunOrder, Store

RunId = Annotated[str, Path(description="The run's id, as the registration answered it.", max_length=64)]
Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many entries.")]
Cursor = Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the page before.")]
Metric = Annotated[str, Query(max_length=128, description="The metric's name, as GET /runs/{run_id} lists them.")]
FromStep = Annotated[int | None, Query(ge=0, le=2**53, description="The first step, included.")]
ToStep = Annotated[int | None, Query(ge=0, le=2**53, description="The last step, included.")]
LARGEST = 2**31 - 1  # that a database's column of this kind holds
OneAttempt = Annotated[
    int | None,
    Query(le=LARGEST, description="Only this attempt, as it was; else every frame that no later attempt hides."),
]


def make_router(store: Store) -> APIRouter:
    """Routes that read `store`."""
    router = APIRouter(tags=["readers"])

    @router.get("/runs")
    def list_runs(
        project: Annotated[str | None, Query(description="Only runs of this project.")] = None,
        run: Annotated[str | None, Query(description="Only runs of this name; not an id.")] = None,
        state: Annotated[RunState | None, Query(description="Only runs in this state.")] = None,
        order: Annotated[RunOrder, Query(description="Sort key; with a minus, largest first.")] = "-updated",
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> service.RunPage:
        """List runs. A run that is updated between two pages may move past the cursor; all others are listed once."""
        return service.list_runs(store, project=project, run=run, state=state, order=order, limit=limit, cursor=cursor)

    @router.get("/runs/{run_id}")
    def describe_run(run_id: RunId) -> RunDetail:
        """All about one run besides its frames."""
        return service.describe_run(store, run_id)

    @router.get("/runs/{run_id}/series")
    def series(
        run_id: RunId,
        metric: Metric,
        layer: Annotated[
            int | None, Query(le=LARGEST, description="The layer; needed for a metric with a value per layer.")
        ] = None,
        head: Annotated[
            int | None, Query(le=LARGEST, description="The head, for a metric that is recorded per head.")
        ] = None,
        from_step: FromStep = None,
        to_step: ToStep = None,
        points: Annotated[int, Query(ge=3, le=10_000, description="At most so many buckets.")] = 1000,
        attempt: OneAttempt = None,
    ) -> service.Series:
        """One metric over steps."""
        return service.series(
            store,
            run_id,
            metric,
            layer=layer,
            head=head,
            from_step=from_step,
            to_step=to_step,
            points=points,
            attempt=attempt,
        )

    @router.get("/compare")
    def compare(
        run: Annotated[list[str], Query(max_length=20, description="The ids of up to 20 runs, each as `run=`.")],
        metric: Metric,
        layer: Annotated[
            int | None, Query(description="The layer; needed for a metric with a value per layer.")
        ] = None,
        head: Annotated[int | None, Query(description="The head, for a metric that is recorded per head.")] = None,
        from_step: FromStep = None,
        to_step: ToStep = None,
        points: Annotated[int, Query(ge=3, le=10_000, description="At most so many buckets per run.")] = 1000,
    ) -> service.Comparison:
        """One metric of several runs over the same buckets of steps."""
        return service.compare(
            store, run, metric, layer=layer, head=head, from_step=from_step, to_step=to_step, points=points
        )

    @router.get("/runs/{run_id}/heatmap")
    def heatmap(
        run_id: RunId,
        metric: Metric,
        from_step: FromStep = None,
        to_step: ToStep = None,
        columns: Annotated[int, Query(ge=1, le=2000, description="At most so many spans of steps.")] = 200,
        attempt: OneAttempt = None,
    ) -> service.Heatmap:
        """One metric over steps and layers."""
        return service.heatmap(
            store, run_id, metric, from_step=from_step, to_step=to_step, columns=columns, attempt=attempt
        )

    @router.get("/runs/{run_id}/export", response_class=StreamingResponse)
    def export(
        run_id: RunId,
        format: Annotated[ExportFormat, Query(description="csv, or parquet where the service has pyarrow.")] = "csv",
        metric: Annotated[
            list[str] | None, Query(max_length=1000, description="Only these metrics; may be given several times.")
        ] = None,
        from_step: FromStep = None,
        to_step: ToStep = None,
        attempt: OneAttempt = None,
    ) -> StreamingResponse:
        """All raw samples as a table with a row per value."""
        download = service.export(
            store, run_id, format, metrics=metric, from_step=from_step, to_step=to_step, attempt=attempt
        )
        headers = {"Content-Disposition": f'attachment; filename="{download.name}"'}
        return StreamingResponse(download.parts, media_type=download.media_type, headers=headers)

    @router.get("/alerts")
    def list_alerts(
        state: Annotated[AlertState | None, Query(description="Only alerts in this state.")] = None,
        run: Annotated[str | None, Query(description="Only alerts of the run with this id; not a name.")] = None,
        project: Annotated[str | None, Query(description="Only alerts of runs of this project.")] = None,
        rule: Annotated[str | None, Query(description="Only alerts of this rule.")] = None,
        family: Annotated[str | None, Query(description="Only alerts of rules of this family.")] = None,
        severity: Annotated[
            Literal["info", "warning", "critical"] | None, Query(description="Only alerts this bad.")
        ] = None,
        acknowledged: Annotated[
            bool | None, Query(description="Only alerts that somebody has seen to, or nobody.")
        ] = None,
        silenced: Annotated[
            bool | None, Query(description="Only alerts that are silenced now, or that are not.")
        ] = None,
        since: Annotated[
            datetime | None,
            Query(description="Only alerts that changed at this time or later, as in 2026-01-31T12:00:00Z."),
        ] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> service.AlertPage:
        """List alerts, newest first."""
        return service.list_alerts(
            store,
            state=state,
            run_id=run,
            project=project,
            rule=rule,
            family=family,
            severity=severity,
            is_acknowledged=acknowledged,
            is_silenced=silenced,
            since=since,
            limit=limit,
            cursor=cursor,
        )

    @router.get("/alerts/{alert_id}")
    def describe_alert(
        alert_id: Annotated[str, Path(description="The alert's id, as GET /alerts answered it.", max_length=64)],
    ) -> Alert:
        """One alert."""
        with store.read() as reader:
            return reader.alert(alert_id)

    @router.get("/notifications")
    def list_notifications(
        receiver: Annotated[str | None, Query(description="Only to this receiver.")] = None,
        status: Annotated[DeliveryStatus | None, Query(description="Only with this status.")] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> service.NotificationPage:
        """What receivers were told of alerts, and are to be told, newest first."""
        return service.list_notifications(store, receiver=receiver, status=status, limit=limit, cursor=cursor)

    return router
