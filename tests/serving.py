"""The real service in a thread of the test's process, on a socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from tests.databases import SqliteFile
from tsemon_server.limits.values import Limits
from tsemon_server.main import Application, create_app, make_server
from tsemon_server.parts import make_parts
from tsemon_server.settings import Settings


@contextmanager
def serving(app: FastAPI, limits: Limits | None = None, port: int = 0) -> Iterator[str]:
    """The address of `app`, which ends with the block; on any port that is free, or on this one."""
    server = make_server(app, limits or Limits())
    # The socket listens before the server runs, so early requests wait in its queue instead of being refused.
    listener = socket.create_server(("127.0.0.1", port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


class Served(NamedTuple):
    """A server that is running."""

    url: str
    port: int


@contextmanager
def served_from(path: Path) -> Iterator[Served]:
    """A server on a new database file: for tests that need no process of its own, which takes seconds to start."""
    file = SqliteFile(path)
    file.migrate()
    with serving(create_app(Settings(database=file.url))) as url:
        yield Served(url, int(url.rpartition(":")[2]))


class Stage(Application):
    """An application that can pass its requests to another one, so that several tests can share a running server.

    The browser may keep the files of the web UI without asking again: forty requests for each page that a test opens.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(make_parts(settings), settings)
        self._shown: Application | None = None
        self._num_open = 0
        self._change = threading.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = self._shown
        if shown is None or scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
            return
        self._loop = asyncio.get_running_loop()

        async def send_to_keep(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["path"].startswith("/ui/"):
                MutableHeaders(scope=message)["Cache-Control"] = "max-age=3600, immutable"
            await send(message)

        self._count(1)
        try:
            await shown(scope, receive, send_to_keep)
        finally:
            self._count(-1)

    def _count(self, num: int) -> None:
        with self._change:
            self._num_open += num
            self._change.notify_all()

    @contextmanager
    def showing(self, app: Application) -> Iterator[None]:
        """Pass all requests to `app`. At the end, its event streams close and its last responses go out."""
        assert self._shown is None, "another application is shown already"
        parts = app.state.parts
        parts.start()
        self._shown = app
        try:
            yield
        finally:
            self._shown = None
            with self._change:
                if self._num_open:
                    self._loop.call_soon_threadsafe(parts.feed.end)
                are_done = self._change.wait_for(lambda: self._num_open == 0, timeout=60)
            parts.stop()
            assert are_done, f"{self._num_open} requests have not ended"
