"""Each request gets an id and a line in the log."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tsemon_server.logs import request_id

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Ids of requests that we take from others."""
ROUTINE = ("/frames", "/heartbeat", "/healthz", "/readyz", "/metrics")
"""Ends of the paths that are asked for again and again: where all is well, these are told at the level debug only."""
SLOW_S = 1.0
"""Not so where the answer took longer."""
MAX_PATH = 256


class RequestLog:
    """Gives each request an id, which its answer and all its log lines bear, and tells how it was answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        is_fit = REQUEST_ID.fullmatch(given) and not given.startswith("tsm_")  # which would be a token in the log
        id = given if is_fit else secrets.token_hex(8)
        request_id.set(id)  # for the rest of this request's task
        status = 500  # what is answered where nobody inside does
        began = time.perf_counter()

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        finally:
            _tell(scope, status, time.perf_counter() - began)


def _tell(scope: Scope, status: int, took_s: float) -> None:
    is_routine = status < 400 and took_s < SLOW_S and scope["path"].endswith(ROUTINE)
    level = logging.DEBUG if is_routine else logging.WARNING if status >= 500 else logging.INFO
    if not log.isEnabledFor(level):
        return
    access = scope.get("state", {}).get("access")
    fields = {
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH],  # without the query, which may hold anything
        "status": status,
        "duration_ms": round(1000 * took_s, 1),
        "client": scope["client"][0] if scope.get("client") else None,
        "token_id": getattr(access, "token_id", None),
    }
    log.log(level, "request", extra={"fields": fields})
