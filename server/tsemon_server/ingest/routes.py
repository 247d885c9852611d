"""The routes that writers call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from tsemon.errors import TsemonError
from tsemon_server.bodies import read_body, read_raw, takes
from tsemon_server.ingest import schemas, service
from tsemon_server.store import Run, Store

RunId = Annotated[str, Path(description="The run's id, as the registration answered it.", max_length=64)]
Count = Callable[[Literal["accepted", "duplicate", "refused"], int], None]

SMALL_BYTES = 2**16
"""Bodies up to this are read at once: in a millisecond, for which other requests wait."""


def make_router(store: Store, observe: service.Observe, count: Count) -> APIRouter:
    """Routes that write to `store`. `observe` sees the new frames, `count` how many there were."""
    router = APIRouter(tags=["writers"])

    @router.post("/runs", openapi_extra=takes(schemas.Registration))
    async def register(request: Request) -> service.Registered:
        """Register a run, or a new attempt of it."""
        raw = await read_raw(request)
        return await run_in_threadpool(lambda: service.register(store, read_body(schemas.Registration, raw)))

    @router.patch("/runs/{run_id}", openapi_extra=takes(schemas.RunChange))
    async def change_run(run_id: RunId, request: Request) -> Run:
        """Change a run's state, tags or config."""
        raw = await read_raw(request)

        def change() -> Run:
            body = read_body(schemas.RunChange, raw)
            with store.write() as writer:
                writer.change_run(run_id, state=body.state, tags=body.tags, config=body.config)
                return writer.run(run_id)

        return await run_in_threadpool(change)

    @router.delete("/runs/{run_id}", status_code=204, response_class=Response)
    def delete_run(run_id: RunId) -> None:
        """Delete a run with all its frames and alerts."""
        with store.write() as writer:
            writer.delete_run(run_id)

    @router.post("/runs/{run_id}/frames", openapi_extra=takes(schemas.FramesBody), response_model=service.Receipt)
    async def accept_frames(run_id: RunId, request: Request) -> Response:
        """Store frames. The reply comes after the commit; what is sent twice is stored once."""
        try:
            batch = await _batch(store, run_id, await read_raw(request))
            kept = store.write_soon(run_id, lambda writer: service.keep(writer, batch, observe))
            receipt: service.Receipt = await asyncio.wrap_future(kept)
        except TsemonError:
            count("refused", 1)
            raise
        count("accepted", receipt.accepted)
        count("duplicate", receipt.duplicates)
        return Response(receipt.model_dump_json(), media_type="application/json")

    @router.post("/runs/{run_id}/heartbeat", openapi_extra=takes(schemas.Heartbeat))
    async def heartbeat(run_id: RunId, request: Request) -> service.Pulse:
        """Tell that a writer is alive, and hear of the run's alerts."""
        raw = await read_raw(request)
        return await run_in_threadpool(lambda: service.heard_of(store, run_id, read_body(schemas.Heartbeat, raw)))

    return router


async def _batch(store: Store, run_id: str, raw: bytearray) -> service.Batch:
    """On the event loop where it takes less than another thread would."""
    if len(raw) > SMALL_BYTES:
        return await run_in_threadpool(service.read, store, run_id, raw)
    body = schemas.read_frames(raw)
    num_blocks = store.known_num_blocks(run_id, body.attempt)
    if num_blocks is None:
        num_blocks = await run_in_threadpool(store.num_blocks, run_id, body.attempt)
    return service.batch_of(run_id, body, num_blocks)
