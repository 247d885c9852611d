"""The gate that every request passes: who asks, and whether they may."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tsemon.errors import Forbidden, TsemonError, Unauthorized
from tsemon_server.access.keeper import ANYONE, Access, Keeper
from tsemon_server.access.needs import Need, Needs
from tsemon_server.access.tokens import id_of
from tsemon_server.errors import respond

COOKIE = "tsemon_token"
"""Where a browser keeps the token that it signed in with: scripts cannot read it, and pages elsewhere not send it."""

_HARMLESS = ("GET", "HEAD", "OPTIONS")


class Gate:
    """Lets a request through with `scope["state"]["access"]` set, or answers 401, 403 or 404.

    `needs` is what the routes need. It is checked before a body is read or any work is done. Without a keeper everybody may
    do everything.
    """

    def __init__(self, app: ASGIApp, keeper: Keeper | None, needs: Needs) -> None:
        self._app, self._keeper, self._needs = app, keeper, needs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["access"] = await self._let_in(scope)
            except TsemonError as error:
                answer = respond(error)
                if isinstance(error, Unauthorized):
                    answer.headers["WWW-Authenticate"] = "Bearer"
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _let_in(self, scope: Scope) -> Access | None:
        if self._keeper is None:
            return ANYONE
        need, path_names = self._needs.find(scope["method"], scope["path"])
        if not need.scopes:
            return None  # nobody asks who it is; GET /session does it by itself
        headers = Headers(scope=scope)
        text, is_from_cookie = token_of(headers)
        if text is None:
            raise Unauthorized(
                "expected a token in the header `Authorization: Bearer tsm_...`, got none; `tsemon token create` makes one"
            )
        access = await self._keeper.access_of(text)
        if is_from_cookie and scope["method"] not in _HARMLESS:
            check_same_origin(headers)
        named = {name: [value] for name, value in path_names.items()}
        if access.project is not None and need.of in ("project", "runs"):
            named |= _narrow(scope, need, access.project)
        await self._keeper.check(access, need, named)
        return access


def access_of(request: Request) -> Access:
    """What whoever sent the request may do."""
    access: Access = request.state.access
    return access


async def may_still_ask(request: Request, keeper: Keeper) -> bool:
    """Whether the token that let a request in would do so now: for an answer that lasts."""
    text, _ = token_of(request.headers)
    try:
        return text is not None and await keeper.access_of(text) == access_of(request)
    except Unauthorized:
        return False


def token_of(headers: Headers) -> tuple[str | None, bool]:
    """The token that came, and whether a browser sent it by itself. A header goes before a cookie."""
    scheme, _, text = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return text.strip(), False
    # Not by http.cookies: strangers may send any, and it takes seconds for what is quoted in a nasty way.
    for part in headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value, True
    return None, False


def token_id_of(headers: Headers) -> str | None:
    """The id in the token that came, be it good for anything or not; empty where it is no token, None where none came."""
    text, _ = token_of(headers)
    return None if text is None else id_of(text)


def check_same_origin(headers: Headers) -> None:
    """Raises Forbidden unless the browser says that our own page asks.

    Its cookie is not sent for pages elsewhere (SameSite), but is for those of another port or a subdomain.
    """
    origin = headers.get("origin", "")
    if not origin or origin.partition("://")[2].lower() != headers.get("host", "").lower():
        raise Forbidden(
            f"expected a request of this service's own page, got one with the Origin {origin[:80]!r}; programs send their "
            "token in the header Authorization. A proxy in front has to pass the header Host on"
        )


def _narrow(scope: Scope, need: Need, project: str) -> dict[str, list[str]]:
    """Let the query be about the project alone; the runs that it names."""
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    if need.of == "runs":
        return {"run_id": [one for name, value in query if name == "run" for one in value.split(",") if one]}
    others = {value for name, value in query if name == "project"} - {project}
    if others:
        raise Forbidden(f"expected no project but {project!r}, which the token is for, got {min(others)!r:.80}")
    rest = [(name, value) for name, value in query if name != "project"]
    scope["query_string"] = urlencode([*rest, ("project", project)]).encode()
    return {}
