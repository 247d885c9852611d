"""Requests to an application without a socket, on one event loop for all tests of a process.

Starlette's TestClient goes nine times from thread to thread for a request, and starts an event loop for each application.
"""

import asyncio
import threading
from functools import cache, partialmethod

import httpx


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tests-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


@cache
def loop():
    """The one of this process."""
    return Loop()


class Asker:
    """A client of an application. It neither starts nor stops it: its parts are at work already, or need not be."""

    def __init__(self, app, client=("testclient", 50000)):
        self.app = app
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=client)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", follow_redirects=True)
        self.cookies = self._http.cookies

    def request(self, method, url, **options):
        content = options.get("content")
        if content is not None and not isinstance(content, str | bytes | bytearray | memoryview):
            options["content"] = _in_parts(content)
        return loop().run(self._http.request(method, url, **options))

    get = partialmethod(request, "GET")
    head = partialmethod(request, "HEAD")
    options = partialmethod(request, "OPTIONS")
    post = partialmethod(request, "POST")
    put = partialmethod(request, "PUT")
    patch = partialmethod(request, "PATCH")
    delete = partialmethod(request, "DELETE")


async def _in_parts(parts):
    for part in parts:
        yield part
