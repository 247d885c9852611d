"""Every error as `{"error": code, "detail": text}`, in one place."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from tsemon.errors import InvalidArgument, TsemonError

log = logging.getLogger(__name__)


class Problem(BaseModel):
    """Why a request was not done."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    error: str
    """A word for programs, the same for the same kind of problem."""
    detail: str
    """A sentence for people: what was expected, what came, what to do next."""


def problem_response(status: int, code: str, detail: str) -> JSONResponse:
    return JSONResponse(Problem(error=code, detail=detail).model_dump(), status)


def handle_errors(app: FastAPI) -> None:
    """Let `app` answer every exception with a Problem."""

    def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, TsemonError):
            return problem_response(error.status, error.code, str(error))
        if isinstance(error, RequestValidationError):
            return problem_response(InvalidArgument.status, InvalidArgument.code, _first_problem(error))
        if isinstance(error, HTTPException):
            code = HTTPStatus(error.status_code).name.lower()
            detail = f"{request.method} {request.url.path}: {error.detail}; /docs lists the routes there are"
            return problem_response(error.status_code, code, detail)
        # The traceback goes to the log; a client has no use for it, and an attacker may have.
        log.error("unexpected %s in %s %s", type(error).__name__, request.method, request.url.path)
        return problem_response(
            500, "internal_error", "the service failed in a way it did not expect; its log tells how"
        )

    for kind in (TsemonError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _first_problem(error: RequestValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}, got {problem.get('input')!r:.80}"
