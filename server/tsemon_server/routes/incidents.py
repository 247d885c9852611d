"""Incidents, and the sub-steps that cause them."""

from __future__ import annotations

from tsemon_answers.incidents import IncidentDetail, IncidentPage, IncidentPageQuery, SubStepQuery, Within
from tsemon_server.access.needs import needs
from tsemon_server.routes.signature import Asked, IncidentId, RunId, TheStore, api_router
from tsemon_server.services.queries import incidents, service

router = api_router("incidents")


@router.get("/incidents")
@needs("read", of="project")
def list_incidents(asked: Asked[IncidentPageQuery], store: TheStore) -> IncidentPage:
    """List incidents, newest first."""
    return service.list_incidents(store, asked)


@router.get("/incidents/{incident_id}")
@needs("read", of="incident")
def describe_incident(incident_id: IncidentId, store: TheStore) -> IncidentDetail:
    """One incident, with its cause within the step, and the sequences with the largest losses."""
    return incidents.describe(store, incident_id)


@router.get("/runs/{run_id}/incidents")
@needs("read", of="run")
def list_incidents_of_run(run_id: RunId, store: TheStore) -> IncidentPage:
    """The incidents of all attempts of a run, newest first."""
    return service.incidents_of_run(store, run_id)


@router.get("/runs/{run_id}/sub-step")
@needs("read", of="run")
def find_sub_step(run_id: RunId, asked: Asked[SubStepQuery], store: TheStore) -> Within:
    """The sub-step that makes tokens alike or states explode, with or without an incident."""
    return incidents.sub_step(store, run_id, asked)
