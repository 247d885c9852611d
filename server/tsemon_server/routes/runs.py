"""Runs: registering, listing, describing, changing and deleting them."""

from __future__ import annotations

import asyncio
import functools

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from tsemon.wire import MAX_BODY_BYTES
from tsemon_answers.runs import (
    Glances,
    GlancesQuery,
    Registered,
    Run,
    RunDetail,
    RunPage,
    RunPageQuery,
    Tags,
    TagsQuery,
    Zoom,
)
from tsemon_server.access.gate import access_of
from tsemon_server.access.needs import needs
from tsemon_server.bodies import read_body
from tsemon_server.routes.openapi import takes
from tsemon_server.routes.reading import read_raw
from tsemon_server.routes.signature import Asked, RunId, TheGlances, TheParts, TheStore, api_router, as_json
from tsemon_server.services.ingest import service as ingest
from tsemon_server.services.ingest.schemas import Registration, RunChange
from tsemon_server.services.queries import glances, service

router = api_router("readers")
writers = api_router("writers")


@writers.post("/runs")
@needs("ingest", of="body")
@takes(Registration)
async def register_run(request: Request, store: TheStore) -> Registered:
    """Register a run, or a new attempt of it."""
    raw = await read_raw(request, MAX_BODY_BYTES)
    body = await run_in_threadpool(read_body, Registration, raw)
    access_of(request).check_project(body.project)
    key = await run_in_threadpool(ingest.key_of, store, body)
    done = store.write_soon(key, lambda writer: ingest.register(writer, body))
    registered: Registered = await asyncio.wrap_future(done)
    return registered


@writers.patch("/runs/{run_id}")
@needs("ingest", of="run")
@takes(RunChange)
async def change_run(run_id: RunId, request: Request, parts: TheParts) -> Run:
    """Change a run's state, tags or config."""
    raw = await read_raw(request, MAX_BODY_BYTES)
    body = await run_in_threadpool(read_body, RunChange, raw)
    work = functools.partial(ingest.change, run_id=run_id, body=body, watch=parts.watch)
    changed: Run = await asyncio.wrap_future(parts.store.write_soon(run_id, work))
    return changed


@writers.post("/runs/{run_id}/zoom")
@needs("admin", of="run")
async def zoom_in(run_id: RunId, store: TheStore) -> Zoom:
    """Ask a live run for closer samples. Until its process has the request, asking again changes nothing."""
    asked: Zoom = await asyncio.wrap_future(store.write_soon(run_id, lambda writer: writer.runs.ask_for_zoom(run_id)))
    return asked


@writers.delete("/runs/{run_id}", status_code=204, response_class=Response, response_model=None)
@needs("admin", of="run")
async def delete_run(run_id: RunId, store: TheStore) -> None:
    """Delete a run with all its frames and alerts."""
    await asyncio.wrap_future(store.write_soon(run_id, lambda writer: writer.runs.delete(run_id)))


@router.get("/runs")
@needs("read", "ingest", of="project")  # a writer asks whether a run of its name has frames
def list_runs(asked: Asked[RunPageQuery], store: TheStore) -> RunPage:
    """List runs. One whose place in the order changes between two pages may move past the cursor; all others are
    listed once."""
    return service.list_runs(store, asked)


@router.get("/tags")
@needs("read", of="project")
def list_tags(asked: Asked[TagsQuery], store: TheStore) -> Tags:
    """The tags that runs have, the most used first."""
    with store.read() as reader:
        return Tags(tags=reader.runs.tags(asked.project, 200))


@router.get("/glances", response_model=Glances)
@needs("read", of="runs")
def list_glances(asked: Asked[GlancesQuery], store: TheStore, kept: TheGlances) -> Response:
    """Runs at a glance: where the loss of each goes, and which layer is worst."""
    return as_json(glances.glances(store, kept, asked))


@router.get("/runs/{run_id}")
@needs("read", "ingest", of="run")  # a writer asks whether its attempt is over
def describe_run(run_id: RunId, store: TheStore) -> RunDetail:
    """All about one run besides its frames."""
    return glances.described(store, run_id)
