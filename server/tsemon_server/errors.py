"""Every error as `{"error": code, "detail": text}`, in one place."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tsemon.errors import Busy, InvalidArgument, TsemonError
from tsemon_answers.operation import Problem
from tsemon_server.logs import request_id

log = logging.getLogger(__name__)


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": when}
    for status, when in (
        (400, "The request is none that the service reads, or names another host."),
        (401, "It has no token where one is needed, or one that is not good."),
        (403, "Its token is not for this, or a web page elsewhere sent it, or the service changes nothing."),
        (404, "There is no such run, metric, alert, rule or whatever else it names."),
        (405, "There is no such method here; the header Allow names those there are."),
        (408, "It came too slowly."),
        (409, "What it names is not in a state in which this can be done, or there are as many as are taken."),
        (413, "Its body is too large."),
        (414, "Its path or query is too long."),
        (415, "Its body is encoded in a way that the service does not read."),
        (422, "An argument, or the body, is wrong."),
        (429, "There were too many; the header Retry-After says when to come again."),
        (431, "Its headers are too long."),
        (501, "The service lacks a package that this needs."),
        (503, "The server cannot do it now; the header Retry-After says when to send it again."),
    )
}
"""What any route may answer with besides its own, for OpenAPI."""


def problem_response(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Build the response for an error. A 429 or 503 always has a Retry-After: 1 second unless `headers` says otherwise."""
    if status in (429, 503):
        headers = {"Retry-After": "1", **(headers or {})}
    return JSONResponse(Problem(error=code, detail=detail).model_dump(), status, headers)


def respond(error: TsemonError) -> JSONResponse:
    """Build the response for an error that the server raised on purpose."""
    headers = {"Retry-After": str(math.ceil(error.retry_after_s))} if isinstance(error, Busy) else None
    return problem_response(error.status, error.code, str(error), headers)


def handle_errors(app: FastAPI) -> None:
    """Let `app` answer every exception with a Problem."""

    def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, TsemonError):
            return respond(error)
        if isinstance(error, RequestValidationError):
            return problem_response(InvalidArgument.status, InvalidArgument.code, _first_problem(error))
        if isinstance(error, HTTPException):
            code = HTTPStatus(error.status_code).name.lower()
            detail = f"{request.method} {request.url.path[:200]}: {error.detail}; /docs lists the routes there are"
            headers = {"Allow": _allowed(request)} if error.status_code == 405 else None
            return problem_response(error.status_code, code, detail, headers)
        # The traceback goes to the log; a client has no use for it, and an attacker may have.
        log.error("unexpected %s", type(error).__name__, exc_info=error)
        return problem_response(
            500,
            "internal_error",
            f"the service failed in a way it did not expect; its log tells how, at the request {request_id.get()}",
        )

    for kind in (TsemonError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
    app.add_middleware(_Unexpected, answer=answer)


class _Unexpected:
    """Answers what nobody expected where other middleware still sees the answer: Starlette's own handler is outside."""

    def __init__(self, app: ASGIApp, answer: Callable[[Request, Exception], JSONResponse]) -> None:
        self._app, self._answer = app, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_seen(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        except Exception as error:
            if scope["type"] != "http" or has_begun:
                raise
            await self._answer(Request(scope), error)(scope, receive, send)


def _allowed(request: Request) -> str:
    """The methods that the path has. Starlette names those of one route, where several may share the path."""
    asked = ({**request.scope, "method": method} for method in ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"))
    routes = request.app.routes
    return ", ".join(
        scope["method"] for scope in asked if any(route.matches(scope)[0] is Match.FULL for route in routes)
    )


def _first_problem(error: RequestValidationError) -> str:
    problem = error.errors()[0]
    place, *names = problem["loc"]
    # People type an argument at a command or on the page, and know of no query.
    parts = names if names and place in ("query", "path") else problem["loc"]
    where = ".".join(str(part)[:80] for part in parts)
    given = None if problem["type"] == "missing" else problem.get("input")
    if problem["type"] == "string_too_short" and not given:
        return f"{where}: expected at least one character, got an empty text"
    return f"{where}: {problem['msg']}, got {given!r:.80}"
