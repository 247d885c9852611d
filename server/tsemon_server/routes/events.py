"""Events as a stream that a browser or a program reads: server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from tsemon.errors import UnknownRun
from tsemon_answers.events import EventKind, EventsQuery
from tsemon_server.access.gate import access_of, may_still_ask
from tsemon_server.access.needs import needs
from tsemon_server.events import Feed
from tsemon_server.events.feed import Listener
from tsemon_server.routes.signature import Asked, TheParts, api_router
from tsemon_server.store import Store

RETRY_MS = 2000
MEDIA_TYPE = "text/event-stream"

router = api_router("readers")


class EventStream(StreamingResponse):
    """What a listener of `feed` hears, for as long as it wants and may."""

    def __init__(
        self,
        feed: Feed,
        run_ids: frozenset[str],
        project: str | None,
        kinds: frozenset[EventKind],
        seconds: float,
        beat_s: float,
        may_go_on: Callable[[], Awaitable[bool]],
    ) -> None:
        # The last is for nginx, which would wait until it has a few kB.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__((), media_type=MEDIA_TYPE, headers=headers)
        self._feed, self._asked = feed, (run_ids, project, kinds)
        self._seconds, self._beat_s, self._may_go_on = seconds, beat_s, may_go_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.listening(*self._asked) as listener:
            self.body_iterator = self._told(listener)
            await super().__call__(scope, receive, send)

    async def _told(self, listener: Listener) -> AsyncIterator[str]:
        now = time.monotonic()
        until, asked_at = now + self._seconds, now
        yield f"retry: {RETRY_MS}\nevent: ready\ndata: {{}}\n\n"
        while not listener.is_over and (left_s := until - time.monotonic()) > 0:
            events = await listener.take(min(self._beat_s, left_s))
            yield "".join(f"event: {event.kind}\ndata: {event.data}\n\n" for event in events) or ": alive\n\n"
            if time.monotonic() - asked_at >= self._beat_s:
                asked_at = time.monotonic()
                if not await self._may_go_on():
                    return


@router.get("/events", response_class=StreamingResponse, responses={200: {"content": {MEDIA_TYPE: {}}}})
@needs("read", of="body")
async def stream_events(request: Request, asked: Asked[EventsQuery], parts: TheParts) -> EventStream:
    """What changes of runs and alerts, while it changes, as server-sent events."""
    keeper, run_ids, project = parts.keeper, frozenset(asked.run_ids), access_of(request).project
    await run_in_threadpool(_check, parts.store, run_ids, project)

    async def may_go_on() -> bool:
        return keeper is None or await may_still_ask(request, keeper)

    return EventStream(parts.feed, run_ids, project, frozenset(asked.kinds), asked.seconds, parts.beat_s, may_go_on)


def _check(store: Store, run_ids: frozenset[str], project: str | None) -> None:
    """Raises UnknownRun where there is no such run, for whoever asks."""
    with store.read() as reader:
        for run_id in sorted(run_ids):
            if project not in (None, reader.runs.get(run_id).project):
                raise UnknownRun(f"project {project!r} has no run with the id {run_id!r:.80}")
