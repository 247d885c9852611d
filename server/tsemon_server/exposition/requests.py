"""Counts requests by what was asked for and how it was answered."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tsemon_server.exposition.meters import Meters

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
"""In place of methods and paths that nobody knows: strangers may ask for any."""
GONE = "499"
"""In place of a status, where the client left before it was answered."""


class RequestMeter:
    """Sees each request before any other part does, and its answer last."""

    def __init__(self, app: ASGIApp, meters: Meters) -> None:
        self._app, self._meters = app, meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), GONE

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        except Exception:
            status = "500" if status == GONE else status
            raise
        finally:
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._meters.count_request(method, route_of(scope), status, time.perf_counter() - began)


def route_of(scope: Scope) -> str:
    """The template of the path, never the path itself."""
    return getattr(scope.get("route"), "path", OTHER)
