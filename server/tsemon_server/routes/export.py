"""All raw samples of a run as a file, made while it is sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tsemon_answers.series import ExportQuery
from tsemon_server.access.needs import needs
from tsemon_server.routes.signature import Asked, RunId, TheParts, api_router
from tsemon_server.services.queries import service
from tsemon_server.services.queries.export import MEDIA_TYPES

log = logging.getLogger(__name__)

TABLES = {media_type.partition(";")[0]: {"schema": {"type": "string"}} for media_type in MEDIA_TYPES.values()}
"""What an export may be, for OpenAPI."""

router = api_router("readers")


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


@router.get("/runs/{run_id}/export", response_class=StreamingResponse, responses={200: {"content": TABLES}})
@needs("read", of="run")
def export_run(run_id: RunId, asked: Asked[ExportQuery], parts: TheParts) -> StreamingResponse:
    """All raw samples as a table with a row per value."""
    download = service.export(parts.store, run_id, asked)
    headers = {"Content-Disposition": f'attachment; filename="{download.name}"'}
    return TimedResponse(download.parts, parts.limits.export_s, download.media_type, headers)
