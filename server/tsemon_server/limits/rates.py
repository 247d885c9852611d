"""The second door, behind the one that asks for tokens: how much, and how often, of one token or address."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import lru_cache

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tsemon.errors import Busy, TooManyRequests, TooSlow, TsemonError
from tsemon_server.errors import respond
from tsemon_server.limits.admission import Visit
from tsemon_server.limits.buckets import Buckets
from tsemon_server.limits.values import Limits

BURST_S = 10
UNIT_BYTES = 64 * 1024
MAX_NAME = 100
"""Of an address that is none."""
IDS_KEPT_S = 1.0
"""For so long a token that was just made may be refused where wrong ones come without end."""
_READS = ("GET", "HEAD", "OPTIONS")
_HEALTH = "/readyz"
"""What watches over the process asks for this without a token: strangers who sign in must not be in its way."""
_ALWAYS = "/healthz"


class Rates:
    """Refuses whoever asks too often, or has too much under way.

    Whoever brings a token is known by it, others by their address. On this machine itself, where no token is asked for,
    nobody is counted: all have the same address.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._most_at_once = app, limits.requests_of_one
        self._most_slow = max(1, limits.slow_requests // 2)
        self._reads = Buckets(limits.reads_per_s, limits.reads_per_s * BURST_S)
        self._writes = Buckets(limits.writes_per_s, limits.writes_per_s * BURST_S)
        self._at_once: Counter[str] = Counter()
        self._slow_at_once: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        who = _who(scope) if scope["type"] == "http" else ""
        if not who:
            await self._app(scope, receive, send)
            return
        is_read = scope["method"] in _READS
        visit: Visit = scope["state"]["visit"]
        refusal = self._refusal(who, self._reads if is_read else self._writes, visit.is_slow)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        visit.who = who
        self._at_once[who] += 1
        self._slow_at_once[who] += visit.is_slow
        try:
            await self._app(scope, receive, send)
        finally:
            self._at_once[who] -= 1
            self._slow_at_once[who] -= visit.is_slow
            if not self._at_once[who]:
                del self._at_once[who], self._slow_at_once[who]
            if not is_read:
                self._writes.charge(who, max(0, visit.num_frames - 1) + visit.num_bytes // UNIT_BYTES)

    def _refusal(self, who: str, buckets: Buckets, is_slow: bool) -> ASGIApp | None:
        if self._at_once[who] >= self._most_at_once:
            return respond(
                TooManyRequests(f"{self._at_once[who]} requests of {who} are under way, no more at once; come again")
            )
        if is_slow and self._slow_at_once[who] >= self._most_slow:
            return respond(
                TooManyRequests(
                    f"{self._slow_at_once[who]} exports and trials of rules of {who} are under way, no more at once; "
                    "come again when one is done"
                )
            )
        wait_s = buckets.take(who)
        if not wait_s:
            return None
        return respond(TooManyRequests(f"{who} asks too often; come again in {wait_s:.1f} s", retry_after_s=wait_s))


class Failures:
    """Answers 429 where an address brings one wrong token after the other, at last without a look into the database.

    Those that bring from there the id of a token that there is are let in all the same: a proxy, or an office, has one
    address. `token_id_of` reads the id of the token in some headers: None where there is none. `ids` are those of all
    tokens: read at most once a second, whatever comes, they take the place of a look-up for each wrong one.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        token_id_of: Callable[[Headers], str | None],
        ids: Callable[[], Collection[str]],
    ) -> None:
        self._app, self._token_id_of, self._read_ids = app, token_id_of, ids
        self._buckets = Buckets(limits.failures_per_s, limits.failures_per_s * 60)
        self._ids: Collection[str] = ()
        self._read_at = -math.inf
        self._reading = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = address_of(scope) or "this machine"
        visit: Visit = scope["state"]["visit"]

        async def check(token_id: str | None) -> None:
            wait_s = self._buckets.wait_s(address)
            if wait_s and token_id is not None and not await self._is_known(token_id):
                raise _too_many_failures(address, wait_s)

        try:
            await check(self._token_id_of(Headers(scope=scope)))
        except TsemonError as refusal:
            visit.leave()
            await respond(refusal)(scope, receive, send)
            return
        scope["state"]["check_token_id"] = check  # for a token in a body
        is_replaced = False

        async def send_unless_too_often(message: Message) -> None:
            nonlocal is_replaced
            is_failure = message["type"] == "http.response.start" and message["status"] == 401
            if is_failure:
                visit.leave()
            if is_failure and (wait_s := self._buckets.take(address)):
                is_replaced = True
                await respond(_too_many_failures(address, wait_s))(scope, receive, send)
            if not is_replaced:
                await send(message)

        await self._app(scope, receive, send_unless_too_often)

    async def _is_known(self, token_id: str) -> bool:
        if not token_id or token_id in self._ids:
            return bool(token_id)
        asked_at = time.monotonic()
        async with self._reading:
            if self._read_at < asked_at - IDS_KEPT_S:
                self._read_at = time.monotonic()  # first, so that a database that fails is not asked more often
                self._ids = await run_in_threadpool(self._read_ids)
        return token_id in self._ids


class Strangers:
    """Keeps those who were let in without a token, where others need one, from taking the room of those who have one.

    They are few at a time, and what they send must come soon. The gate sets `scope["state"]["access"]` to None for them.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._most, self._body_s = app, limits.strangers, limits.stranger_body_s
        self._at_once: Counter[tuple[bool, str]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["state"]["access"] is not None or scope["path"] == _ALWAYS:
            await self._app(scope, receive, send)
            return
        is_health, address = scope["path"] == _HEALTH, address_of(scope)
        rooms = {(is_health, "*"): self._most}
        if address:  # else it may be a proxy of this machine, behind which all are
            rooms[is_health, address] = max(1, self._most // 2)
        if any(self._at_once[room] >= most for room, most in rooms.items()):
            refusal = Busy("too many requests without a token are under way, no more at once; send it again later")
            scope["state"]["visit"].leave()
            await respond(refusal)(scope, receive, send)
            return
        self._at_once.update(rooms.keys())
        try:
            await self._app(scope, _in_time(receive, self._body_s), send)
        finally:
            self._at_once.subtract(rooms.keys())
            self._at_once += Counter()  # forgets the zeros


def _in_time(receive: Receive, within_s: float) -> Receive:
    """Raises TooSlow where a body is not complete so many seconds after it was first asked for."""
    until: float | None = None
    is_complete = False

    async def receive_in_time() -> Message:
        nonlocal until, is_complete
        if is_complete:
            return await receive()  # that somebody hangs up
        now = asyncio.get_running_loop().time()
        until = now + within_s if until is None else until
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError:
            raise TooSlow(f"expected a body without a token within {within_s} s; send it again") from None
        is_complete = not message.get("more_body", False)
        return message

    return receive_in_time


def _too_many_failures(address: str, wait_s: float) -> TooManyRequests:
    detail = f"too many requests without a valid token from {address}; come again in {wait_s:.1f} s"
    return TooManyRequests(detail, retry_after_s=wait_s)


def address_of(scope: Scope) -> str:
    """Of whoever asks; of IPv6 the first 64 bits, for one machine has all the others. Empty on this machine itself."""
    return _address((scope.get("client") or ("", 0))[0])


@lru_cache(4096)
def _address(host: str) -> str:
    if not host:  # a Unix socket
        return ""
    try:
        address = ipaddress.ip_address(_without_port(host))
    except ValueError:  # whatever a proxy makes of it: somebody, whoever that is
        return host[:MAX_NAME]
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return ""
    return str(address) if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))


def _without_port(host: str) -> str:
    """Some proxies pass 203.0.113.7:50000 on, or [2001:db8::1]:50000."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


def _who(scope: Scope) -> str:
    """Empty for whoever is not counted."""
    token_id = getattr(scope.get("state", {}).get("access"), "token_id", None)
    return address_of(scope) if token_id is None else f"the token {token_id}"
