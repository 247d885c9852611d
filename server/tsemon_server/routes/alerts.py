"""Alerts, silences and notifications: listing them, and what people do about them."""

from __future__ import annotations

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from tsemon_answers.alerts import (
    Alert,
    AlertPage,
    AlertPageQuery,
    NotificationPage,
    NotificationsQuery,
    Silence,
    Silences,
    SilencesQuery,
)
from tsemon_server.access.gate import access_of
from tsemon_server.access.needs import needs
from tsemon_server.routes.openapi import takes
from tsemon_server.routes.reading import read_raw
from tsemon_server.routes.signature import AlertId, Asked, SilenceId, TheStore, api_router
from tsemon_server.services import care
from tsemon_server.services.queries import service

router = api_router("alerts")
readers = api_router("readers")


@readers.get("/alerts")
@needs("read", of="project")
def list_alerts(asked: Asked[AlertPageQuery], store: TheStore) -> AlertPage:
    """List alerts, newest first."""
    return service.list_alerts(store, asked)


@readers.get("/alerts/{alert_id}")
@needs("read", of="alert")
def describe_alert(alert_id: AlertId, store: TheStore) -> Alert:
    """One alert."""
    with store.read() as reader:
        return reader.alerts.get(alert_id)


@readers.get("/notifications")
@needs("read", of="all")
def list_notifications(asked: Asked[NotificationsQuery], store: TheStore) -> NotificationPage:
    """What receivers were told of alerts, and are to be told, newest first."""
    return service.list_notifications(store, asked)


@router.post("/alerts/{alert_id}/ack")
@needs("admin", of="alert")
@takes(care.Acknowledgement)
async def acknowledge_alert(alert_id: AlertId, request: Request, store: TheStore) -> Alert:
    """Acknowledge an alert. An alert that is acknowledged already stays as it is."""
    return await run_in_threadpool(care.acknowledge, store, alert_id, await read_raw(request))


@router.delete("/alerts/{alert_id}/ack")
@needs("admin", of="alert")
def unacknowledge_alert(alert_id: AlertId, store: TheStore) -> Alert:
    """Take that back."""
    with store.write() as writer:
        return writer.alerts.unacknowledge(alert_id)


@router.post("/alerts/{alert_id}/resolve")
@needs("admin", of="alert")
@takes(care.Acknowledgement)
async def resolve_alert(alert_id: AlertId, request: Request, store: TheStore) -> Alert:
    """Call an alert over that fires. Its rule opens another one only after its condition was over."""
    return await run_in_threadpool(care.resolve, store, alert_id, await read_raw(request))


@router.get("/silences")
@needs("read", of="project")
def list_silences(asked: Asked[SilencesQuery], store: TheStore) -> Silences:
    """What is silenced now."""
    with store.read() as reader:
        found = reader.silences.all()
    return Silences(silences=[silence for silence in found if asked.project in (None, silence.project)])


@router.post("/silences")
@needs("admin", of="body")
@takes(care.NewSilence)
async def add_silence(request: Request, store: TheStore) -> Silence:
    """Tell nobody of some alerts until a certain time."""
    raw = await read_raw(request)
    return await run_in_threadpool(care.silence, store, raw, access_of(request).check_project)


@router.delete("/silences/{silence_id}", status_code=204, response_class=Response, response_model=None)
@needs("admin", of="body")
def remove_silence(silence_id: SilenceId, request: Request, store: TheStore) -> None:
    """Let a silence end now."""
    care.end_silence(store, silence_id, access_of(request).is_for)
