"""The routes that writers call."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager
from typing import Annotated, Protocol

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from tsemon.errors import TsemonError
from tsemon.wire import MAX_BODY_BYTES
from tsemon_server.access.gate import access_of
from tsemon_server.bodies import read_body, read_raw, takes
from tsemon_server.ingest import schemas, service
from tsemon_server.limits.admission import visit_of
from tsemon_server.store import Run, Store, Writer

RunId = Annotated[str, Path(description="The run's id, as the registration answered it.", max_length=64)]

SMALL_BYTES = 2**16
"""Bodies up to this are read at once: in a millisecond, for which other requests wait."""
LARGE_AT_ONCE = 2
"""Larger ones are read so many at a time: a body of lists takes ten times its size meanwhile."""


class Meter(Protocol):
    """Counts bodies of frames."""

    def count_body(self, accepted: int, duplicates: int, seconds: float) -> None:
        """One was stored, so long after it had come."""

    def count_refused(self) -> None:
        """One was not."""

    def committing(self) -> AbstractContextManager[None]:
        """While one waits for its commit."""


def make_router(store: Store, observe: service.Observe, meter: Meter) -> APIRouter:
    """Routes that write to `store`. `observe` sees the new frames, `meter` how many there were."""
    router = APIRouter(tags=["writers"])
    in_turn = asyncio.Semaphore(LARGE_AT_ONCE)

    @router.post("/runs", openapi_extra=takes(schemas.Registration))
    async def register(request: Request) -> service.Registered:
        """Register a run, or a new attempt of it."""
        raw = await read_raw(request, MAX_BODY_BYTES)

        def read() -> tuple[schemas.Registration, str]:
            body = read_body(schemas.Registration, raw)
            access_of(request).check_project(body.project)
            return body, service.key_of(store, body)

        body, key = await run_in_threadpool(read)
        done = store.write_soon(key, lambda writer: service.register(writer, body))
        registered: service.Registered = await asyncio.wrap_future(done)
        return registered

    @router.patch("/runs/{run_id}", openapi_extra=takes(schemas.RunChange))
    async def change_run(run_id: RunId, request: Request) -> Run:
        """Change a run's state, tags or config."""
        raw = await read_raw(request, MAX_BODY_BYTES)

        body = await run_in_threadpool(read_body, schemas.RunChange, raw)

        def change(writer: Writer) -> Run:
            writer.change_run(run_id, state=body.state, tags=body.tags, config=body.config)
            return writer.run(run_id)

        changed: Run = await asyncio.wrap_future(store.write_soon(run_id, change))
        return changed

    @router.delete("/runs/{run_id}", status_code=204, response_class=Response)
    async def delete_run(run_id: RunId) -> None:
        """Delete a run with all its frames and alerts."""
        await asyncio.wrap_future(store.write_soon(run_id, lambda writer: writer.delete_run(run_id)))

    @router.post("/runs/{run_id}/frames", openapi_extra=takes(schemas.FramesBody), response_model=service.Receipt)
    async def accept_frames(run_id: RunId, request: Request) -> Response:
        """Store frames. The reply comes after the commit; what is sent twice is stored once."""
        try:
            raw = await read_raw(request, MAX_BODY_BYTES)
            began = time.perf_counter()
            batch = await _batch(store, run_id, raw, in_turn)
            visit_of(request).num_frames = len(batch.frames)
            with meter.committing():
                kept = store.write_soon(run_id, lambda writer: service.keep(writer, batch, observe), len(batch.frames))
                receipt: service.Receipt = await asyncio.wrap_future(kept)
        except TsemonError:
            meter.count_refused()
            raise
        meter.count_body(receipt.accepted, receipt.duplicates, time.perf_counter() - began)
        return Response(receipt.model_dump_json(), media_type="application/json")

    @router.post("/runs/{run_id}/heartbeat", openapi_extra=takes(schemas.Heartbeat))
    async def heartbeat(run_id: RunId, request: Request) -> service.Pulse:
        """Tell that a writer is alive, and hear of the run's alerts."""
        raw = await read_raw(request)
        body = read_body(schemas.Heartbeat, raw)
        # Not on a thread of its own: where the database is locked, those that wait would soon have all of them.
        heard = store.write_soon(run_id, lambda writer: service.heard_of(writer, run_id, body))
        pulse: service.Pulse = await asyncio.wrap_future(heard)
        return pulse

    return router


async def _batch(store: Store, run_id: str, raw: bytearray, in_turn: asyncio.Semaphore) -> service.Batch:
    """On the event loop where it takes less than another thread would."""
    if len(raw) > SMALL_BYTES:
        async with in_turn:
            return await run_in_threadpool(service.read, store, run_id, raw)
    body = schemas.read_frames(raw)
    num_blocks = store.known_num_blocks(run_id, body.attempt)
    if num_blocks is None:
        num_blocks = await run_in_threadpool(store.num_blocks, run_id, body.attempt)
    return service.batch_of(run_id, body, num_blocks)
