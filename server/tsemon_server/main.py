"""The service put together: which part meets which."""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tsemon.errors import InvalidArgument, TsemonError
from tsemon.wire import API
from tsemon_server import alerts, ingest, queries, ui
from tsemon_server.alerts import ActiveRules, Rulebook, Watch
from tsemon_server.alerts.liveness import LISTEN_S, LOOK_EVERY_S, Liveness
from tsemon_server.bodies import schemas_of
from tsemon_server.errors import Problem, handle_errors, problem_response
from tsemon_server.exposition import Exposition
from tsemon_server.housekeeping import PAUSE_S, Housekeeping
from tsemon_server.notify.configuration import load
from tsemon_server.notify.notifier import Notifier
from tsemon_server.rounds import Rounds
from tsemon_server.rules import PACK, Rule
from tsemon_server.settings import Settings
from tsemon_server.spools import ReadOnly, SpoolView
from tsemon_server.store import Record, Store, without_password
from tsemon_server.workers import run_workers

DOCS_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' https://cdn.jsdelivr.net; frame-ancestors 'none'; "
    "style-src 'self' 'unsafe-inline' https://cdn.jsdelivr.net; img-src 'self' data: https://fastapi.tiangolo.com"
)
POLICY = "default-src 'self'; frame-ancestors 'none'"

DESCRIPTION = """What goes on inside transformers while they train: runs, frames, series, heat maps, alerts.

Errors are `{"error": code, "detail": text}`. This page loads Swagger UI from cdn.jsdelivr.net; the schema itself is at
`/openapi.json` and needs nothing from elsewhere.
"""


class Health(Record):
    """That the service can do its work."""

    status: str
    """Always `ok`; trouble is told by the HTTP status."""


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
                headers.setdefault("Content-Security-Policy", DOCS_POLICY if scope["path"] == "/docs" else POLICY)
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


def create_app(
    settings: Settings,
    *,
    rules: Sequence[Rule] | None = None,
    clock: Callable[[], float] = time.time,
    housekeeping_pause_s: float = PAUSE_S,
    look_every_s: float = LOOK_EVERY_S,
    listen_s: float = LISTEN_S,
) -> FastAPI:
    """The service on its database, which is migrated first, or on a spool folder; built-in rules where none are given.

    Raises TsemonError where the settings or the database do not allow it.
    """
    if not settings.insecure and not _is_loopback(settings.host):
        raise InvalidArgument(
            f"expected a loopback address such as 127.0.0.1, got host {settings.host!r}: there is no login, so whoever "
            "reaches the port may read, write and delete everything; listen locally, or accept that "
            "with the option --insecure"
        )
    if settings.spool is not None and settings.workers > 1:
        raise InvalidArgument(f"a spool folder is shown by one process, got workers={settings.workers}; leave them out")
    if settings.spool is not None and settings.notify is not None:
        raise InvalidArgument(
            f"a spool folder is shown and nobody is told of it, got notify={settings.notify!r}; leave it out"
        )
    notified = None if settings.notify is None else load(Path(settings.notify))
    view = None if settings.spool is None else SpoolView(settings.spool)
    store = Store(settings.database if view is None else view.database, clock)
    exposition = Exposition(store, clock)
    built_in = PACK if rules is None else rules
    rulebook, active = Rulebook(built_in), ActiveRules(built_in)
    rulebook.register(store)
    watch = Watch(active, on_error=exposition.count_rule_error)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        housekeeping = Housekeeping(store, housekeeping_pause_s)
        liveness = Liveness(store, active, listen_s=listen_s, clock=clock)
        looks = Rounds(store, "liveness", [liveness.look], look_every_s)
        at_work: list[Rounds | Notifier] = [housekeeping, looks]
        if notified is not None:
            at_work.append(Notifier(store, notified, clock))
        for work in at_work:
            work.start()
        if view is not None:
            view.start(watch.observe)
        yield
        for work in reversed(at_work):
            await run_in_threadpool(work.stop)
        store.close()
        if view is not None:
            await run_in_threadpool(view.close)

    app = FastAPI(title="tsemon", version="1", description=DESCRIPTION, lifespan=lifespan, redoc_url=None)
    app.state.store = store
    problems: dict[int | str, dict[str, Any]] = {"default": {"model": Problem, "description": "Why it was not done."}}
    for router in (
        ingest.make_router(store, watch.observe, exposition.count),
        queries.make_router(store),
        alerts.make_router(store, rulebook, active),
    ):
        app.include_router(router, prefix=API, responses=problems)
    if view is not None:
        app.include_router(view.make_router(store), prefix=API, responses=problems)
        app.add_middleware(ReadOnly, root=view.root)
    app.include_router(exposition.make_router())
    app.include_router(_health(store), responses=problems)
    app.include_router(ui.router)
    handle_errors(app)
    hosts = None if settings.insecure else frozenset({"localhost", "127.0.0.1", "[::1]", _bracketed(settings.host)})
    app.add_middleware(Guard, hosts=hosts)
    _describe_bodies(app)
    return app


def serve(settings: Settings) -> None:
    """Run the service until SIGTERM or SIGINT; exit with status 1 and a sentence where it cannot start."""
    try:
        app = create_app(settings)
        listener = _listen(settings.host, settings.port)
    except TsemonError as error:
        sys.exit(f"tsemon: {error}")
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
    if settings.workers == 1:
        _run(app, listener)
    else:
        app.state.store.close()  # it was opened to find out whether it can be, and to migrate it
        run_workers(settings.workers, _run_another, settings, listener)


def _run_another(settings: Settings, listener: socket.socket) -> None:
    try:
        app = create_app(settings)
    except TsemonError as error:
        sys.exit(f"tsemon: {error}")
    _run(app, listener)


def _run(app: FastAPI, listener: socket.socket) -> None:
    config = uvicorn.Config(app, access_log=False, log_level="warning", timeout_graceful_shutdown=10)
    server = uvicorn.Server(config)
    # uvicorn sets its own handler while it runs: this one hears a signal that comes before it, and the one that uvicorn
    # raises again once it has shut down.
    signal.signal(signal.SIGTERM, server.handle_exit)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def _health(store: Store) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get("/healthz")
    async def healthz() -> Health:
        """Whether the process is up."""
        return Health(status="ok")

    @router.get("/readyz")
    def readyz() -> Health:
        """Whether the database answers; 503 where it does not."""
        with store.read() as reader:
            reader.ping()
        return Health(status="ok")

    return router


def _describe_bodies(app: FastAPI) -> None:
    """Add to OpenAPI the bodies that the routes read raw."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        schema["components"]["schemas"] |= schemas_of((*ingest.BODIES, *alerts.BODIES))
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _listen(host: str, port: int) -> socket.socket:
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol. With it a reply waits 40 ms for the
    # client's delayed acknowledgement: 20 requests a second instead of 130.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(2048)
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _without_port(host: str) -> str:
    """The name in a Host header; an IPv6 address keeps its brackets."""
    return (host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]).lower()
