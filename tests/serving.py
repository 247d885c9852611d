"""The real service in a thread of the test's process, on a socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from tsemon_server.limits.values import Limits
from tsemon_server.main import make_server


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
