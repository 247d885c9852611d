"""The first door: heads of a sane size, and no more under way than there is room for."""

from __future__ import annotations

import re
from collections import Counter

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tsemon.errors import Busy
from tsemon.wire import API
from tsemon_server.errors import problem_response, respond
from tsemon_server.limits.values import Limits

MAX_HEAD_BYTES = 64 * 1024
"""Of the names and values of all headers."""
MAX_TARGET_BYTES = 16 * 1024
"""Of the path and the query as they were sent."""
MAX_PARAMETERS = 1024
"""In a query."""

_SLOW = re.compile(rf"{API}/(runs/[^/]+/export|rules/test)/?")
_ALWAYS = "/healthz"
"""Costs nothing and tells who watches over the process that it lives: a busy one must not be killed for it."""
_ALL = "*"


class Visit:
    """A request under way, and what it has taken."""

    def __init__(self, admission: Admission, is_slow: bool = False) -> None:
        self._admission, self.is_slow = admission, is_slow
        self._is_under_way = False
        self.who = ""
        """Whose it is; empty for whoever is not counted."""
        self.num_bytes = 0
        self.num_frames = 0

    @property
    def room_bytes(self) -> int:
        """For a body that is larger there is never room, however little else is under way."""
        return self._admission.limits.bytes_held // (2 if self.who else 1)

    def hold(self, num_bytes: int) -> None:
        """Count bytes that stay in memory until the request is answered, so many in all. Raises Busy."""
        if num_bytes > self.num_bytes:
            self._admission.hold(num_bytes - self.num_bytes, self.who)
            self.num_bytes = num_bytes

    def enter(self) -> None:
        """Take a place among those that are under way."""
        self._is_under_way = True
        self._admission.count(1, self.is_slow)

    def leave(self) -> None:
        """Give the place back: of what was refused nothing is left but that somebody may not read why."""
        if self._is_under_way:
            self._is_under_way = False
            self._admission.count(-1, self.is_slow)


class Admission:
    """Counts what is under way, and refuses what is too much. Gives each request its `Visit`."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self.limits = app, limits
        self._num_bytes: Counter[str] = Counter()
        """All by an asterisk, and those of each one who is counted."""
        self._num_requests = 0
        self._num_slow = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_slow = _SLOW.fullmatch(scope["path"]) is not None
        refusal = _excess(scope) or self._busy(scope["path"], is_slow)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        visit = Visit(self, is_slow)
        scope.setdefault("state", {})["visit"] = visit
        if scope["path"] != _ALWAYS:
            visit.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            visit.leave()
            self._release(visit)

    def count(self, num: int, is_slow: bool) -> None:
        """So many more, or fewer, are under way."""
        self._num_requests += num
        self._num_slow += num * is_slow

    def hold(self, num_bytes: int, who: str) -> None:
        """Take so much of the room for bodies; half of it is the most for one. Raises Busy."""
        for owner, room in ((_ALL, self.limits.bytes_held), (who, self.limits.bytes_held // 2)):
            if owner and self._num_bytes[owner] + num_bytes > room:
                raise Busy(
                    f"bodies of {self._num_bytes[owner]} bytes are under way, and there is room for {room}; come again later"
                )
        self._num_bytes[_ALL] += num_bytes
        self._num_bytes[who] += num_bytes

    def _release(self, visit: Visit) -> None:
        for owner in (_ALL, visit.who):
            self._num_bytes[owner] -= visit.num_bytes
            if not self._num_bytes[owner]:
                del self._num_bytes[owner]

    def _busy(self, path: str, is_slow: bool) -> ASGIApp | None:
        if self._num_requests >= self.limits.requests and path != _ALWAYS:
            return respond(Busy(f"{self._num_requests} requests are under way, no more at once; send it again later"))
        if is_slow and self._num_slow >= self.limits.slow_requests:
            return respond(
                Busy(f"{self._num_slow} exports and trials of rules are under way, no more at once; ask again later")
            )
        return None


def visit_of(request: Request) -> Visit:
    """What the request has taken so far."""
    visit: Visit = request.state.visit
    return visit


def _excess(scope: Scope) -> ASGIApp | None:
    query: bytes = scope["query_string"]
    target_bytes = len(scope.get("raw_path") or scope["path"]) + len(query)
    if target_bytes > MAX_TARGET_BYTES:
        return problem_response(
            414, "uri_too_long", f"expected at most {MAX_TARGET_BYTES} bytes of path and query, got {target_bytes}"
        )
    if query.count(b"&") >= MAX_PARAMETERS:
        return problem_response(
            414, "uri_too_long", f"expected at most {MAX_PARAMETERS} parameters, got {query.count(b'&') + 1}"
        )
    head_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if head_bytes > MAX_HEAD_BYTES:
        return problem_response(
            431, "headers_too_large", f"expected at most {MAX_HEAD_BYTES} bytes of headers, got {head_bytes}"
        )
    return None
