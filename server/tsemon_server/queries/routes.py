"""The routes that read."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Generator
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BeforeValidator
from starlette.types import Message, Receive, Scope, Send

from tsemon.wire import AlertState, RunState
from tsemon_server.queries import frames, glances, rows, service
from tsemon_server.queries.export import MEDIA_TYPES, ExportFormat
from tsemon_server.store import LARGEST, Alert, Condition, DeliveryStatus, Record, RunDetail, RunFilter, RunOrder, Store

log = logging.getLogger(__name__)

RunId = Annotated[str, Path(description="The run's id, as the registration answered it.", max_length=64)]
Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many entries.")]
Cursor = Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the page before.")]
Metric = Annotated[str, Query(max_length=128, description="The metric's name, as GET /runs/{run_id} lists them.")]
FromStep = Annotated[int | None, Query(ge=0, le=2**53, description="The first step, included.")]
ToStep = Annotated[int | None, Query(ge=0, le=2**53, description="The last step, included.")]
OneAttempt = Annotated[
    int | None,
    Query(le=LARGEST, description="Only this attempt, as it was; else every frame that no later attempt hides."),
]
LARGE_AT_ONCE = 4
"""Heat maps and comparisons that are made at the same time: each takes ten times its size meanwhile."""

TABLES = {media_type.partition(";")[0]: {"schema": {"type": "string"}} for media_type in MEDIA_TYPES.values()}
"""What an export may be, for OpenAPI."""


def _written_out(time: str) -> str:
    if not re.match(r"[0-9]{4}-", time):  # or it would be so many seconds, or milliseconds, since 1970
        raise ValueError("expected a time such as 2026-01-31T12:00:00Z")
    return time


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
    router.include_router(rows.make_router(store))

    @router.get("/runs")
    def list_runs(
        project: Annotated[str | None, Query(description="Only runs of this project.")] = None,
        run: Annotated[str | None, Query(description="Only runs of this name; not an id.")] = None,
        state: Annotated[RunState | None, Query(description="Only runs in this state.")] = None,
        condition: Annotated[
            Condition | None, Query(description="Only runs in this condition: a state, or silent or stuck.")
        ] = None,
        q: Annotated[
            str | None,
            Query(
                max_length=200, description="Only runs with this in their name, project or a tag, in capitals or not."
            ),
        ] = None,
        tag: Annotated[
            list[str] | None, Query(max_length=20, description="Only runs with this tag; with all, where several come.")
        ] = None,
        order: Annotated[
            RunOrder, Query(description="Sort key; with a minus, largest first. `live` is one way only.")
        ] = "-updated",
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> service.RunPage:
        """List runs. One whose place in the order changes between two pages may move past the cursor; all others are
        listed once."""
        which = RunFilter(project=project, run=run, state=state, condition=condition, text=q, tags=tag or ())
        return service.list_runs(store, which, order=order, limit=limit, cursor=cursor)

    @router.get("/tags")
    def list_tags(
        project: Annotated[str | None, Query(description="Only those of runs of this project.")] = None,
    ) -> service.Tags:
        """The tags that runs have, the most used first."""
        return service.list_tags(store, project)

    @router.get("/runs/{run_id}")
    def describe_run(run_id: RunId) -> RunDetail:
        """All about one run besides its frames."""
        return service.describe_run(store, run_id)

    @router.get("/runs/{run_id}/series")
    def series(
        run_id: RunId,
        metric: Metric,
        layer: Annotated[
            int | None,
            Query(le=LARGEST, description="The layer; needed for a metric with a value per layer. -1 is the last."),
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

    @router.get("/compare", response_model=service.Comparison)
    def compare(
        run: Annotated[list[str], Query(max_length=20, description="The ids of up to 20 runs, each as `run=`.")],
        metric: Metric,
        layer: Annotated[
            int | None,
            Query(
                le=LARGEST,
                description="The layer; needed for a metric with a value per layer. -1 is the last of each run.",
            ),
        ] = None,
        head: Annotated[
            int | None, Query(le=LARGEST, description="The head, for a metric that is recorded per head.")
        ] = None,
        from_step: FromStep = None,
        to_step: ToStep = None,
        points: Annotated[int, Query(ge=3, le=10_000, description="At most so many buckets per run.")] = 1000,
        along: Annotated[
            service.Along,
            Query(description="What `x` is: the step, seconds since the run's first frame, or its scalar `tokens`."),
        ] = "step",
    ) -> Response:
        """One metric of several runs over the same buckets of steps."""
        with in_turn:
            found = service.compare(
                store,
                run,
                metric,
                layer=layer,
                head=head,
                from_step=from_step,
                to_step=to_step,
                points=points,
                along=along,
            )
            return _as_json(found)

    @router.get("/glances", response_model=glances.Glances)
    def glance(
        run: Annotated[list[str], Query(max_length=100, description="The ids of up to 100 runs, each as `run=`.")],
        points: Annotated[int, Query(ge=3, le=200, description="At most so many buckets per run.")] = 40,
    ) -> Response:
        """Runs at a glance: where the loss of each goes, and which layer is worst."""
        return _as_json(glances.glances(store, lines, run, points=points))

    @router.get("/runs/{run_id}/heatmap", response_model=service.Heatmap)
    def heatmap(
        run_id: RunId,
        metric: Metric,
        from_step: FromStep = None,
        to_step: ToStep = None,
        columns: Annotated[int, Query(ge=1, le=2000, description="At most so many spans of steps.")] = 200,
        attempt: OneAttempt = None,
        extremes: Annotated[
            bool,
            Query(
                description="Also the value of each cell that is farthest from its mean, and how many are not finite."
            ),
        ] = False,
    ) -> Response:
        """One metric over steps and layers."""
        with in_turn:
            found = service.heatmap(
                store,
                run_id,
                metric,
                from_step=from_step,
                to_step=to_step,
                columns=columns,
                attempt=attempt,
                extremes=extremes,
            )
            return _as_json(found)

    @router.get("/runs/{run_id}/frame", response_model=frames.RecordedFrame)
    def frame(
        run_id: RunId,
        step: Annotated[
            int | None, Query(ge=0, le=2**53, description="The frame nearest to this step; else the newest one.")
        ] = None,
        attempt: OneAttempt = None,
    ) -> Response:
        """All that was measured at one step."""
        return _as_json(frames.frame(store, run_id, step=step, attempt=attempt))

    @router.get("/runs/{run_id}/export", response_class=StreamingResponse, responses={200: {"content": TABLES}})
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
        return TimedResponse(download.parts, export_s, download.media_type, headers)

    @router.get("/alerts")
    def list_alerts(
        state: Annotated[
            list[AlertState] | None,
            Query(max_length=4, description="Only alerts in this state; may be given several times."),
        ] = None,
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
        at_end: Annotated[
            bool | None,
            Query(
                description="Only alerts that `alerts_at_end` of their run counts, warnings and criticals that fired when "
                "it was finished or failed; or only others."
            ),
        ] = None,
        since: Annotated[
            Annotated[datetime, BeforeValidator(_written_out)] | None,
            Query(description="Only alerts that changed at this time or later, as in 2026-01-31T12:00:00Z."),
        ] = None,
        limit: Limit = 50,
        cursor: Cursor = None,
    ) -> service.AlertPage:
        """List alerts, newest first."""
        return service.list_alerts(
            store,
            states=state,
            run_id=run,
            project=project,
            rule=rule,
            family=family,
            severity=severity,
            is_acknowledged=acknowledged,
            is_silenced=silenced,
            at_end=at_end,
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
            return reader.alerts.get(alert_id)

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


def _as_json(found: Record) -> Response:
    return Response(found.model_dump_json(), media_type="application/json")
