"""Events as a stream that a browser or a program reads: server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from tsemon.errors import UnknownRun
from tsemon_server.access.gate import access_of, may_still_ask
from tsemon_server.access.keeper import Keeper
from tsemon_server.events.feed import Feed, Kind, Listener
from tsemon_server.store import Store

BEAT_S = 15.0
"""Where nothing happens, something is sent so often: a proxy leaves the connection open, and we hear when it is broken.

So often is asked, too, whether the token is still good.
"""
RETRY_MS = 2000
LONGEST_S = 3600
MEDIA_TYPE = "text/event-stream"


class EventStream(StreamingResponse):
    """What a listener of `feed` hears, for as long as it wants and may."""

    def __init__(
        self,
        feed: Feed,
        run_ids: frozenset[str],
        project: str | None,
        kinds: frozenset[Kind],
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


def make_router(store: Store, feed: Feed, keeper: Keeper | None, beat_s: float) -> APIRouter:
    """The route that tells of what changes in `store`, as `feed` sees it. `keeper` knows the tokens, if there are any."""
    router = APIRouter(tags=["readers"])

    @router.get("/events", response_class=StreamingResponse, responses={200: {"content": {MEDIA_TYPE: {}}}})
    async def events(
        request: Request,
        run: Annotated[
            list[str] | None, Query(max_length=100, description="Only of the runs with these ids, each as `run=`.")
        ] = None,
        kind: Annotated[
            list[Kind] | None, Query(max_length=2, description="Only events of these kinds, each as `kind=`.")
        ] = None,
        seconds: Annotated[
            int, Query(ge=0, le=LONGEST_S, description="End after so long; who wants to hear more asks again.")
        ] = LONGEST_S,
    ) -> EventStream:
        """What changes of runs and alerts, while it changes, as server-sent events."""
        run_ids, project = frozenset(run or ()), access_of(request).project
        await run_in_threadpool(_check, store, run_ids, project)

        async def may_go_on() -> bool:
            return keeper is None or await may_still_ask(request, keeper)

        return EventStream(feed, run_ids, project, frozenset(kind or ()), seconds, beat_s, may_go_on)

    return router


def _check(store: Store, run_ids: frozenset[str], project: str | None) -> None:
    """Raises UnknownRun where there is no such run, for whoever asks."""
    with store.read() as reader:
        for run_id in sorted(run_ids):
            if project not in (None, reader.runs.get(run_id).project):
                raise UnknownRun(f"project {project!r} has no run with the id {run_id!r:.80}")
