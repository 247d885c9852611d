"""The real service in a thread of the test's process, on a socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI

from tests.databases import SqliteFile
from tsemon_server.limits.values import Limits
from tsemon_server.main import create_app, make_server
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
