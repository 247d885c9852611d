"""Signing in: a page hands its token over once, and the browser keeps it where no script reads it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Request, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from tsemon_answers.operation import Session
from tsemon_server.access.gate import COOKIE, check_same_origin, token_of
from tsemon_server.access.keeper import ANYONE, Access, Keeper
from tsemon_server.access.needs import needs
from tsemon_server.access.tokens import id_of
from tsemon_server.bodies import Body, read_body
from tsemon_server.routes.openapi import takes
from tsemon_server.routes.reading import read_raw
from tsemon_server.routes.signature import TheKeeper, api_router

router = api_router("access")

KEPT_S = 30 * 86_400
"""How long a browser keeps it."""


class SignIn(Body):
    """Somebody signs in."""

    token: Annotated[str, Field(max_length=256)]
    """A token, as `tsemon token create` showed it."""


@router.get("/session")
@needs()
async def describe_session(request: Request, keeper: TheKeeper) -> Session:
    """Who asks. A token that is good for nothing is answered with 401, none at all is not."""
    text, _ = token_of(request.headers)
    return _session(keeper, await _access_by(keeper, text))


@router.post("/session")
@needs()
@takes(SignIn)
async def sign_in(request: Request, response: Response, keeper: TheKeeper) -> Session:
    """Keep a token in a cookie of this browser, which scripts cannot read."""
    if "origin" in request.headers:  # a page elsewhere could sign its visitor in as somebody else
        check_same_origin(request.headers)
    raw = await read_raw(request)
    body = await run_in_threadpool(read_body, SignIn, raw)
    text = body.token.strip()
    await request.state.check_token_id(id_of(text))  # the headers said nothing of it
    access = await _access_by(keeper, text)
    if keeper is not None and access is not None:
        is_tls = request.url.scheme == "https"
        response.set_cookie(COOKIE, text, KEPT_S, httponly=True, samesite="strict", secure=is_tls)
    return _session(keeper, access)


@router.delete("/session", status_code=204, response_class=Response, response_model=None)
@needs()
def sign_out(response: Response) -> None:
    """Let this browser forget its token."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")


async def _access_by(keeper: Keeper | None, text: str | None) -> Access | None:
    if keeper is None:
        return ANYONE
    return None if text is None else await keeper.access_of(text)


def _session(keeper: Keeper | None, access: Access | None) -> Session:
    return Session(
        needs_token=keeper is not None,
        scopes=[] if access is None else sorted(access.scopes),
        project=None if access is None else access.project,
        name=None if access is None else access.name,
    )
