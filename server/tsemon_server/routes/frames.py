"""Frames and heartbeats: read raw, validated in one step, committed before the response."""

from __future__ import annotations

import asyncio
import re
import time

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from tsemon.errors import Busy, TsemonError
from tsemon.wire import API, MAX_BODY_BYTES
from tsemon_answers.replies import Pulse, Receipt
from tsemon_server.access.needs import needs
from tsemon_server.bodies import read_body
from tsemon_server.errors import respond
from tsemon_server.limits.admission import visit_of
from tsemon_server.parts import Parts
from tsemon_server.routes.openapi import takes
from tsemon_server.routes.reading import read_raw
from tsemon_server.routes.signature import MAX_RUN_ID, RunId, TheParts, api_router, as_json
from tsemon_server.services.ingest import service
from tsemon_server.services.ingest.packed import header_of, is_packed
from tsemon_server.services.ingest.schemas import FramesBody, Heartbeat

SMALL_BYTES = 2**16
"""Bodies up to this are read at once: in a millisecond, for which other requests wait."""

LOOK_EVERY_S = 0.25
"""How often the server looks whether the client of a body that waits for its transaction is still there."""


router = api_router("writers")


class Writers:
    """Calls the functions of `router` for requests as writers send them: they have no query.

    To find the function and its arguments is all that Starlette and FastAPI would do for such a request, and it would take
    as long as to read a frame. Any other request is left to them.
    """

    def __init__(self, app: ASGIApp, parts: Parts) -> None:
        self._app, self._parts = app, parts
        self._routes = {route.path.rpartition("/")[2]: route for route in router.routes if isinstance(route, APIRoute)}
        self._path = re.compile(rf"{API}/runs/([^/]{{1,{MAX_RUN_ID}}})/({'|'.join(self._routes)})")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_usual = scope["type"] == "http" and scope["method"] == "POST" and not scope["query_string"]
        found = self._path.fullmatch(scope["path"]) if is_usual else None
        if found is None:
            await self._app(scope, receive, send)
            return
        run_id, name = found.groups()
        scope["route"] = self._routes[name]
        try:
            response = await self._routes[name].endpoint(run_id, Request(scope, receive), self._parts)
        except TsemonError as error:
            response = respond(error)
        await response(scope, receive, send)


@router.post("/runs/{run_id}/frames", response_model=Receipt)
@needs("ingest", of="run")
@takes(FramesBody)
async def send_frames(run_id: RunId, request: Request, parts: TheParts) -> Response:
    """Store frames. The reply comes after the commit; what is sent twice is stored once.

    The wire format has a packed form of this body, with a content type of its own.
    """
    meters = parts.meters
    try:
        announced = request.headers.get("content-length", "")
        with parts.backlog.turn(int(announced[:18]) if announced.isdecimal() else 0) as turn:
            content_type = request.headers.get("content-type", "")
            raw = await read_raw(request, MAX_BODY_BYTES, header_of if is_packed(content_type) else None)
            turn.come(len(raw))
            began = time.perf_counter()
            with meters.committing():
                receipt = await _stored(parts, run_id, request, raw, service.reader_of(content_type))
    except TsemonError:
        meters.count_refused()
        raise
    meters.count_body(receipt.accepted, receipt.duplicates, time.perf_counter() - began)
    return as_json(receipt)


async def _stored(parts: Parts, run_id: str, request: Request, raw: bytearray, reader: service.Reader) -> Receipt:
    """Read a body and store it: on the event loop where that takes less than another thread would."""
    if len(raw) > SMALL_BYTES:
        async with parts.large_bodies_read:
            await _check_client(request)
            async with parts.large_bodies:
                batch = await run_in_threadpool(service.read, parts.store, run_id, raw, reader)
            raw.clear()  # whoever called has it, too
            await _check_client(request)
            return await _committed(parts, request, batch)
    body = reader(raw)
    stacks = parts.store.known_stacks(run_id, body.attempt)
    if stacks is None:
        stacks = await run_in_threadpool(parts.store.stacks, run_id, body.attempt)
    return await _committed(parts, request, service.batch_of(run_id, body, stacks))


async def _committed(parts: Parts, request: Request, batch: service.Batch) -> Receipt:
    """Wait for the commit. If the client leaves before the work begins, the work is not done: the client sends it again."""
    visit_of(request).num_frames = len(batch.frames)
    watch = parts.watch
    kept = parts.store.write_soon(batch.run_id, lambda writer: service.Kept(writer, batch, watch), len(batch.frames))
    waiting: asyncio.Future[Receipt] = asyncio.wrap_future(kept)
    while not (await asyncio.wait({waiting}, timeout=LOOK_EVERY_S))[0]:
        if await request.is_disconnected():
            waiting.cancel()
            raise _client_left()
    return waiting.result()


async def _check_client(request: Request) -> None:
    if await request.is_disconnected():
        raise _client_left()


def _client_left() -> Busy:
    return Busy("the client closed the connection before its frames were stored; send them again")


@router.post("/runs/{run_id}/heartbeat", response_model=Pulse)
@needs("ingest", of="run")
@takes(Heartbeat)
async def send_heartbeat(run_id: RunId, request: Request, parts: TheParts) -> Response:
    """Tell that a writer is alive, and hear of the run's alerts."""
    raw = await read_raw(request)
    body = read_body(Heartbeat, raw)
    # Not on a thread of its own: where the database is locked, those that wait would soon have all of them.
    heard = parts.store.write_soon(run_id, lambda writer: service.heard_of(writer, run_id, body))
    pulse: Pulse = await asyncio.wrap_future(heard)
    return as_json(pulse)
