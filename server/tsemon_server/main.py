"""The service put together: which part meets which."""

from __future__ import annotations

import ipaddress
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Response
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tsemon.errors import InvalidArgument, TsemonError
from tsemon.wire import API
from tsemon_server import alerts, events, ingest, queries, ui
from tsemon_server.access import routes as access
from tsemon_server.access.gate import Gate, token_id_of
from tsemon_server.access.keeper import Keeper
from tsemon_server.access.table import describe as describe_scopes
from tsemon_server.alerts import ActiveRules, Rulebook, Watch
from tsemon_server.alerts.liveness import LISTEN_S, LOOK_EVERY_S, Liveness
from tsemon_server.bodies import schemas_of
from tsemon_server.errors import PROBLEMS, handle_errors, problem_response
from tsemon_server.events import BEAT_S, Feed
from tsemon_server.exposition import Exposition, Meters, RequestMeter, share_counters
from tsemon_server.housekeeping import PAUSE_S, Housekeeping
from tsemon_server.limits.admission import Admission
from tsemon_server.limits.connections import BACKLOG, UNSENT_BYTES, BoundedServer, Connection, num_connections
from tsemon_server.limits.rates import Failures, Rates, Strangers
from tsemon_server.limits.values import Limits
from tsemon_server.logs import set_up_logs
from tsemon_server.notify.configuration import load
from tsemon_server.notify.notifier import Notifier
from tsemon_server.parameters import refuse_unknown_parameters
from tsemon_server.request_log import RequestLog
from tsemon_server.rounds import Rounds
from tsemon_server.rules import PACK, Rule
from tsemon_server.settings import Settings
from tsemon_server.spools import ReadOnly, SpoolView
from tsemon_server.store import Record, Store, without_password
from tsemon_server.workers import Worker, run_workers

POLICY = "default-src 'self'; frame-ancestors 'none'"

DESCRIPTION = """What goes on inside transformers while they train: runs, frames, series, heat maps, alerts.

Errors are `{"error": code, "detail": text}`.
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


def create_app(
    settings: Settings,
    *,
    rules: Sequence[Rule] | None = None,
    clock: Callable[[], float] = time.time,
    housekeeping_pause_s: float = PAUSE_S,
    look_every_s: float = LOOK_EVERY_S,
    listen_s: float = LISTEN_S,
    beat_s: float = BEAT_S,
) -> FastAPI:
    """The service on its database, which is migrated first, or on a spool folder; built-in rules where none are given.

    Raises TsemonError where the settings or the database do not allow it.
    """
    if settings.insecure and settings.tokens:
        raise InvalidArgument("expected --tokens or --insecure, got both; with --insecure anyone may do everything")
    needs_tokens = settings.tokens or not (settings.insecure or _is_loopback(settings.host))
    if settings.spool is not None and needs_tokens:
        raise InvalidArgument(
            f"a spool folder is shown without tokens, for it has no database to keep them in, got host {settings.host!r}; "
            "listen on a loopback address such as 127.0.0.1, or let anyone read it with the option --insecure"
        )
    if settings.spool is not None and settings.workers > 1:
        raise InvalidArgument(f"a spool folder is shown by one process, got workers={settings.workers}; leave them out")
    if settings.spool is not None and settings.notify is not None:
        raise InvalidArgument(
            f"a spool folder is shown and nobody is told of it, got notify={settings.notify!r}; leave it out"
        )
    notified = None if settings.notify is None else load(Path(settings.notify))
    view = None if settings.spool is None else SpoolView(settings.spool)
    limits = settings.limits
    database = settings.database if view is None else view.database
    store = Store(
        database,
        clock,
        max_runs=limits.runs,
        max_project_runs=limits.project_runs,
        max_waiting=limits.commits,
    )
    meters = Meters()
    exposition = Exposition(store, meters, settings.metrics, clock=clock)
    built_in = PACK if rules is None else rules
    rulebook, active = Rulebook(built_in), ActiveRules(built_in)
    rulebook.register(store)
    keeper = Keeper(store, clock) if needs_tokens else None
    feed = Feed(store, limits.listeners, clock, written_in=None if view is None else view.written_in)
    watch = Watch(active, on_error=meters.count_rule_error, on_read=meters.count_rules)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        housekeeping = Housekeeping(store, housekeeping_pause_s)
        liveness = Liveness(store, active, listen_s=listen_s, clock=clock)
        looks = Rounds(store, "liveness", [liveness.look], look_every_s)
        at_work: list[Rounds | Notifier] = [housekeeping, looks]
        if notified is not None:
            at_work.append(Notifier(store, notified, clock, count=meters.count_notifications))
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

    app = FastAPI(
        title="tsemon",
        version="1",
        description=DESCRIPTION,
        lifespan=lifespan,
        dependencies=[Depends(refuse_unknown_parameters)],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.store, app.state.feed, app.state.needs_tokens = store, feed, needs_tokens
    for router in (
        ingest.make_router(store, watch.observe, meters),
        queries.make_router(store, limits.export_s),
        alerts.make_router(store, rulebook, active),
        access.make_router(keeper),
        events.make_router(store, feed, keeper, beat_s),
    ):
        app.include_router(router, prefix=API, responses=PROBLEMS)
    if view is not None:
        app.include_router(view.make_router(store), prefix=API, responses=PROBLEMS)
        app.add_middleware(ReadOnly, root=view.root)
    app.include_router(exposition.make_router(), responses=PROBLEMS)
    app.include_router(_health(store), responses=PROBLEMS)
    app.include_router(ui.router)
    handle_errors(app)
    app.add_middleware(Rates, limits=limits)
    app.add_middleware(Strangers, limits=limits)
    app.add_middleware(Gate, keeper=keeper)
    app.add_middleware(Failures, limits=limits, token_id_of=token_id_of, ids=store.tokens.ids)
    app.add_middleware(Admission, limits=limits)
    # Who has a token may use any name where none are given: a page elsewhere that points its name at us has no token.
    by_any_name = settings.insecure or (needs_tokens and not settings.hosts)
    ours = {"localhost", "127.0.0.1", "[::1]", _bracketed(settings.host), *settings.hosts}
    app.add_middleware(Guard, hosts=None if by_any_name else frozenset(ours))
    app.add_middleware(RequestMeter, meters=meters)
    app.add_middleware(RequestLog)  # last, so that it is first to see a request
    _describe(app)
    return app


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
    if app.state.needs_tokens and not app.state.store.tokens.all():
        print("nobody can get in yet: `tsemon token create NAME --scope admin` makes the first token", flush=True)
    if settings.workers == 1:
        _run(app, listener, settings.limits)
    else:
        app.state.store.close()  # it was opened to find out whether it can be, and to migrate it
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
    return BoundedServer(config, limits, on_exit=app.state.feed.end)


def _run(app: FastAPI, listener: socket.socket, limits: Limits) -> None:
    server = make_server(app, limits)
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


def _describe(app: FastAPI) -> None:
    """Serve OpenAPI, with the bodies that the routes read raw, and the scopes that they ask for: made once."""
    generate = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        schema = generate()
        schema["components"]["schemas"] |= schemas_of((*ingest.BODIES, *alerts.BODIES, *access.BODIES))
        if app.state.needs_tokens:
            describe_scopes(schema)
        return schema

    @cache
    def document() -> bytes:
        return json.dumps(openapi(), ensure_ascii=False).encode()

    @app.get("/openapi.json", include_in_schema=False)
    def describe() -> Response:
        return Response(document(), media_type="application/json")

    app.openapi = openapi  # type: ignore[method-assign]


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
