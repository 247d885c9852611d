"""The service put together: which part meets which."""

from __future__ import annotations

import gc
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tsemon.errors import TsemonError
from tsemon_server.access.gate import Gate, token_id_of
from tsemon_server.errors import handle_errors, problem_response
from tsemon_server.exposition import RequestMeter, share_counters
from tsemon_server.limits.admission import Admission
from tsemon_server.limits.connections import BACKLOG, UNSENT_BYTES, BoundedServer, Connection, num_connections
from tsemon_server.limits.rates import Failures, Rates, Strangers
from tsemon_server.limits.values import Limits
from tsemon_server.logs import set_up_logs
from tsemon_server.parts import Parts, make_parts
from tsemon_server.request_log import RequestLog
from tsemon_server.routes import NEEDS, OF_A_FOLDER, ROUTES
from tsemon_server.routes.frames import Writers
from tsemon_server.routes.openapi import describe
from tsemon_server.settings import Settings
from tsemon_server.spools import ReadOnly
from tsemon_server.store.engine import without_password
from tsemon_server.workers import Worker, run_workers

POLICY = "default-src 'self'; frame-ancestors 'none'"

DESCRIPTION = """What goes on inside transformers while they train: runs, frames, series, heat maps, alerts.

Errors are `{"error": code, "detail": text}`.
"""


class Guard:
    """Refuses requests that come from pages elsewhere, and sets the safety headers.

    A page elsewhere can point its own host name at 127.0.0.1 and read us through its visitor's browser; but it cannot
    make the browser send another Host than that name. It can write without reading, as browsers send plain text
    anywhere; but they name the page's Origin then. Programs that are no browsers send none.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("X-Content-Type-Options", "nosniff")
                headers.setdefault("Content-Security-Policy", POLICY)
            await send(message)

        answer = self._refusal(Headers(scope=scope)) or self._app
        await answer(scope, receive, send_safely)

    def _refusal(self, headers: Headers) -> ASGIApp | None:
        if self._hosts is None:
            return None
        ours = ", ".join(sorted(self._hosts))
        host = _without_port(headers.get("host", ""))
        if host not in self._hosts:
            detail = f"expected one of {ours} as Host, got {host[:80]!r}; use one of these in the URL"
            return problem_response(400, "unknown_host", detail)
        origin = headers.get("origin")
        if origin is not None and _without_port(origin.partition("://")[2]) not in self._hosts:
            detail = (
                f"expected no Origin, or one on {ours}, got {origin[:80]!r}; web pages of other hosts may not use this "
                "service, programs need no Origin header"
            )
            return problem_response(403, "foreign_origin", detail)
        return None


class Application(FastAPI):
    """The routes on the parts of one server, in `state.parts`, behind what every request passes."""

    def __init__(self, parts: Parts, settings: Settings) -> None:
        super().__init__(
            title="tsemon",
            version="1",
            description=DESCRIPTION,
            lifespan=_at_work,
            routes=[*ROUTES, *(OF_A_FOLDER if parts.view is not None else ())],
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
        )
        self.state.parts = parts
        limits = parts.limits
        self.add_middleware(Writers, parts=parts)  # first, so that it is last to see a request
        if parts.view is not None:
            self.add_middleware(ReadOnly, root=parts.view.root)
        handle_errors(self)
        self.add_middleware(Rates, limits=limits)
        self.add_middleware(Strangers, limits=limits)
        self.add_middleware(Gate, keeper=parts.keeper, needs=NEEDS)
        self.add_middleware(Failures, limits=limits, token_id_of=token_id_of, ids=parts.store.tokens.ids)
        self.add_middleware(Admission, limits=limits)
        # Who has a token may use any name where none are given: a page elsewhere that points its name at us has no token.
        by_any_name = settings.insecure or (parts.keeper is not None and not settings.hosts)
        ours = {"localhost", "127.0.0.1", "[::1]", _bracketed(settings.host), *settings.hosts}
        self.add_middleware(Guard, hosts=None if by_any_name else frozenset(ours))
        self.add_middleware(RequestMeter, meters=parts.meters)
        self.add_middleware(RequestLog)  # last, so that it is first to see a request

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = describe(super().openapi(), self.routes, self.state.parts.keeper is not None)
        return self.openapi_schema

    @cached_property
    def document(self) -> bytes:
        """The OpenAPI document."""
        return json.dumps(self.openapi(), ensure_ascii=False).encode()


@asynccontextmanager
async def _at_work(app: FastAPI) -> AsyncIterator[None]:
    parts: Parts = app.state.parts
    parts.start()
    yield
    await run_in_threadpool(parts.stop)


def create_app(settings: Settings, **options: Any) -> Application:
    """A server with parts of its own; `options` are those of `make_parts`. Raises TsemonError as that does."""
    return Application(make_parts(settings, **options), settings)


def serve(settings: Settings) -> None:
    """Run the service until SIGTERM or SIGINT.

    Raises TsemonError where it cannot start; exits with status 1 and a sentence where it cannot listen.
    """
    set_up_logs(settings.log_format, settings.log_level)
    try:
        app = create_app(settings)
        listener = _listen(settings.host, settings.port)
    except TsemonError:
        raise  # the command line tells it; a SpoolError is an OSError, too
    except socket.gaierror as error:
        sys.exit(
            f"tsemon: cannot listen on host {settings.host!r}: {error.strerror}; expected an address of this machine "
            "such as 127.0.0.1, or a name that resolves to one"
        )
    except OSError as error:
        sys.exit(
            f"tsemon: cannot listen on {settings.host} port {settings.port}: {error.strerror}; "
            "another service may run there already, choose another port"
        )
    port = listener.getsockname()[1]
    source = (
        without_password(settings.database) if settings.spool is None else f"the folder {settings.spool}, read-only"
    )
    print(f"tsemon serves http://{_bracketed(settings.host)}:{port} from {source}", flush=True)
    parts = app.state.parts
    if parts.keeper is not None and not parts.store.tokens.all():
        print("nobody can get in yet: `tsemon token create NAME --scope admin` makes the first token", flush=True)
    if settings.workers == 1:
        _run(app, listener, settings.limits)
    else:
        parts.store.close()  # it was opened to find out whether it can be, and to migrate it
        run_workers(settings.workers, _run_another, settings, listener)


def _run_another(worker: Worker, settings: Settings, listener: socket.socket) -> None:
    set_up_logs(settings.log_format, settings.log_level)
    share_counters(worker.folder, worker.number)
    try:
        app = create_app(settings)
    except TsemonError as error:
        sys.exit(f"tsemon: {error}")
    _run(app, listener, settings.limits)


def make_server(app: FastAPI, limits: Limits) -> BoundedServer:
    """What serves `app` on a socket."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        backlog=BACKLOG,
        access_log=False,
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=10,
    )
    limits = replace(limits, connections=num_connections(limits))
    return BoundedServer(config, limits, on_exit=app.state.parts.feed.end)


def _run(app: FastAPI, listener: socket.socket, limits: Limits) -> None:
    server = make_server(app, limits)
    # uvicorn sets its own handlers while it runs. These ones hear a signal that comes before, and the one that uvicorn
    # raises again once it has shut down.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    # What is there now stays: modules, routes, rules. A collection that looks through it takes as long as some bodies.
    gc.freeze()
    server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol. With it a reply waits 40 ms for the
    # client's delayed acknowledgement: 20 requests a second instead of 130.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # The system would take megabytes of an answer for each who does not read, and tell us late who does.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(BACKLOG)
    return listener


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _without_port(host: str) -> str:
    """The name in a Host header; an IPv6 address keeps its brackets."""
    return (host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]).lower()
