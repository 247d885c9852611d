"""Two clients for the same calls: one waits, one is awaited.

What can be asked, and how, stands in `calls`; what an answer means in `answers`. Here is only how a request is sent.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import aclosing, closing
from functools import update_wrapper
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from tsemon import errors
from tsemon.wire import API
from tsemon_client import answers, calls
from tsemon_client.calls import Download, Listening, Listing, Request, Talk
from tsemon_client.live import Stream
from tsemon_client.models import Event, Heatmap, Record, Records, Source

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Record)
F = TypeVar("F", bound=Callable[..., Any])
Outcome = httpx.Response | httpx.RequestError
LOST = (httpx.RequestError, *errors.UNANSWERED)
"""Ways in which a stream of events ends that coming back later may mend."""

MAX_TIMEOUT_S = 86_400.0


class _Pages(Generic[R]):
    """What was asked for and not read yet, and where it goes on."""

    def __init__(self, listing: Listing[R]) -> None:
        self.model = listing.model
        self.left: Listing[R] | None = listing
        self.waiting: deque[R] = deque()
        self.num_read = 0
        self.total: int | None = None

    def take(self, listing: Listing[R], page: Any) -> None:
        self.waiting.extend(listing.records(page))
        self.num_read += 1
        self.total = getattr(page, "total", None)
        self.left = listing.after(page)


class Found(Iterator[R], Generic[R]):
    """Records one by one, asked for page by page while they are read."""

    def __init__(self, client: Client, listing: Listing[R]) -> None:
        self._client = client
        self._pages = _Pages(listing)

    def __next__(self) -> R:
        while not self._pages.waiting and self._pages.left is not None:
            self._turn(self._pages.left)
        if not self._pages.waiting:
            raise StopIteration
        return self._pages.waiting.popleft()

    def all(self) -> Records[R]:
        """Those that were not read yet, as a list, which can become a table."""
        return Records(self._pages.model, self)

    def total(self) -> int | None:
        """How many match, counted up to 10,000, as the newest page says. None of alerts, and of an older service."""
        if not self._pages.num_read and self._pages.left is not None:
            self._turn(self._pages.left)
        return self._pages.total

    def _turn(self, listing: Listing[R]) -> None:
        self._pages.take(listing, self._client._answer(listing.request))


class AsyncFound(AsyncIterator[R], Generic[R]):
    """Records one by one, asked for page by page while they are read."""

    def __init__(self, client: AsyncClient, listing: Listing[R]) -> None:
        self._client = client
        self._pages = _Pages(listing)

    async def __anext__(self) -> R:
        while not self._pages.waiting and self._pages.left is not None:
            await self._turn(self._pages.left)
        if not self._pages.waiting:
            raise StopAsyncIteration
        return self._pages.waiting.popleft()

    async def all(self) -> Records[R]:
        """Those that were not read yet, as a list, which can become a table."""
        return Records(self._pages.model, [record async for record in self])

    async def total(self) -> int | None:
        """How many match, counted up to 10,000, as the newest page says. None of alerts, and of an older service."""
        if not self._pages.num_read and self._pages.left is not None:
            await self._turn(self._pages.left)
        return self._pages.total

    async def _turn(self, listing: Listing[R]) -> None:
        self._pages.take(listing, await self._client._answer(listing.request))


def _named(method: F, call: Callable[..., Any], shape: str) -> F:
    """Give a method the call's name, docstring and parameters, and the type that it returns, for help() and notebooks."""
    asked = inspect.signature(call)
    _, _, inner = asked.return_annotation.removesuffix("]").partition("[")
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = asked.replace(
        parameters=[me, *asked.parameters.values()], return_annotation=shape.format(inner.replace("models.", ""))
    )
    update_wrapper(method, call).__signature__ = signature  # type: ignore[attr-defined]
    return method


def _asks(call: Callable[P, Talk[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._talk(call(*args, **kwargs))

    return _named(method, call, "{}")


def _lists(call: Callable[P, Listing[R]]) -> Callable[Concatenate[Client, P], Found[R]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Found[R]:
        return Found(self, call(*args, **kwargs))

    return _named(method, call, "Found[{}]")


def _saves(call: Callable[P, Download]) -> Callable[Concatenate[Client, P], Path]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Path:
        return self._save(call(*args, **kwargs))

    return _named(method, call, "Path")


def _hears(call: Callable[P, Listening]) -> Callable[Concatenate[Client, P], Generator[Event, None, None]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Generator[Event, None, None]:
        return self._hear(call(*args, **kwargs))

    return _named(method, call, "Generator[Event, None, None]")


def _asks_async(call: Callable[P, Talk[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._talk(call(*args, **kwargs))

    return _named(method, call, "{}")


def _lists_async(call: Callable[P, Listing[R]]) -> Callable[Concatenate[AsyncClient, P], AsyncFound[R]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncFound[R]:
        return AsyncFound(self, call(*args, **kwargs))

    return _named(method, call, "AsyncFound[{}]")


def _saves_async(call: Callable[P, Download]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, Path]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Path:
        return await self._save(call(*args, **kwargs))

    return _named(method, call, "Path")


def _hears_async(
    call: Callable[P, Listening],
) -> Callable[Concatenate[AsyncClient, P], AsyncGenerator[Event, None]]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[Event, None]:
        return self._hear(call(*args, **kwargs))

    return _named(method, call, "AsyncGenerator[Event, None]")


def _is_address(url: object) -> bool:
    try:
        if not isinstance(url, str):
            return False
        parsed = urlsplit(url)
        return parsed.scheme in ("http", "https") and bool(httpx.URL(url).host) and parsed.port != 0
    except (ValueError, httpx.InvalidURL):  # a port that is none, half of an IPv6 address, a name that cannot be
        return False


class _Connection:
    """Where the service is, and how it is asked. Reads nothing by itself."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 10.0, retries: int = 3) -> None:
        if isinstance(url, str) and re.match(r"(?:[^/]*//)?[^/]*@", url):
            raise errors.InvalidArgument(
                "expected the service's address without a name or a password in it, which would be shown in errors; "
                "`token`, or TSEMON_TOKEN, says who asks"
            )
        if not _is_address(url):
            raise errors.InvalidArgument(f"the service's address looks like http://127.0.0.1:8731, got {url!r}")
        token = token or os.environ.get("TSEMON_TOKEN", "")
        if not isinstance(token, str) or not re.fullmatch(r"[!-~]*", token := token.strip()):
            raise errors.InvalidArgument(
                "a token is on one line, without spaces, as the service gave it; it is not shown"
            )
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise errors.InvalidArgument(f"expected `timeout_s` above 0 and up to a day, got {timeout_s!r:.80}")
        if not isinstance(retries, int) or retries < 0:
            raise errors.InvalidArgument(f"expected `retries` as a whole number from 0, got {retries!r:.80}")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._retries = retries
        self._token = token
        self._source = Source(self._show_heatmap)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def _options(self) -> dict[str, Any]:
        """What both kinds of httpx client are made of."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        return {
            "base_url": self.url + API,
            "timeout": self._timeout_s,
            "headers": headers,
            # As training does it: straight to the service, so that the token goes nowhere else, and trusting what the
            # system trusts or SSL_CERT_FILE names.
            "trust_env": False,
            "verify": ssl.create_default_context(),
        }

    def _asked(self, http: httpx.Client | httpx.AsyncClient, request: Request[Any]) -> httpx.Request:
        """A request as httpx takes it. Raises InvalidArgument where the client is closed."""
        if http.is_closed:
            raise errors.InvalidArgument("the client is closed; make another one")
        timeout = httpx.Timeout(self._timeout_s, read=request.timeout_s or self._timeout_s)
        try:
            return http.build_request(
                request.method, request.path, params=request.params, json=request.body, timeout=timeout
            )
        except httpx.InvalidURL as error:
            raise errors.InvalidArgument(f"what was asked for has no address: {error}") from error

    def _read(self, request: Request[R], response: httpx.Response) -> R:
        return answers.read(self.url, request.model, response, self._source)

    def _show_heatmap(self, run_id: str, metric: str) -> Heatmap:
        """For a notebook that shows a run, whichever client read it, and whether that is closed by now."""
        with Client(self.url, self._token, timeout_s=self._timeout_s, retries=0) as client:
            return client.heatmap(run_id, metric)


class Client(_Connection):
    """One service, at `url`; `token`, or TSEMON_TOKEN, is for one that asks for it.

    A question is asked again, up to `retries` times and after longer and longer pauses, where no answer comes within
    `timeout_s` or the service or a proxy is busy (429, 502, 503, 504); Retry-After is respected, up to 30 s.

    Goes straight to the host in `url`: no redirect is followed, no proxy or password read from the environment. https
    checks the certificate, with what the system trusts or the file that SSL_CERT_FILE names.

    Raises what the service says as the class of that error in `tsemon.errors`; ServerUnreachable when it says nothing.
    One client may be used by several threads.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 10.0, retries: int = 3) -> None:
        super().__init__(url, token, timeout_s=timeout_s, retries=retries)
        self._http = httpx.Client(**self._options)

    runs = _lists(calls.runs)
    find_run = _asks(calls.find_run)
    run = _asks(calls.run)
    series = _asks(calls.series)
    heatmap = _asks(calls.heatmap)
    compare = _asks(calls.compare)
    frame = _asks(calls.frame)
    alerts = _lists(calls.alerts)
    alert = _asks(calls.alert)
    acknowledge = _asks(calls.acknowledge)
    rules = _asks(calls.rules)
    rule = _asks(calls.rule)
    standing = _asks(calls.standing)
    test_rules = _asks(calls.test_rules)
    tags = _asks(calls.tags)
    glances = _asks(calls.glances)
    export = _saves(calls.export)
    events = _hears(calls.events)

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _talk(self, talk: Talk[T]) -> T:
        answer = None
        while True:
            try:
                request = talk.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = self._answer(request)

    def _answer(self, request: Request[R]) -> R:
        return self._read(request, self._send(request, self._retries))

    def _send(self, request: Request[Any], retries: int, *, stream: bool = False) -> httpx.Response:
        """The answer, which is no error; of a stream only its head."""
        patience = answers.Patience(retries)
        while True:
            outcome: Outcome
            try:
                outcome = self._http.send(self._asked(self._http, request), stream=stream)
                if not outcome.is_success:
                    with closing(outcome):
                        outcome.read()
            except httpx.RequestError as error:
                outcome = error
            pause_s = patience.pause_s(request, outcome)
            if pause_s is None:
                return answers.accept(self.url, outcome)
            time.sleep(pause_s)

    def _save(self, download: Download) -> Path:
        with closing(self._send(download.request, self._retries, stream=True)) as response, download.opened() as file:
            try:
                for part in response.iter_bytes():
                    file.write(part)
            except httpx.RequestError as error:
                raise answers.ours(self.url, error) from error
        return download.path

    def _hear(self, listening: Listening) -> Generator[Event, None, None]:
        stream, retries = Stream(self._source), self._retries
        while True:
            try:
                with closing(self._send(listening.request, retries, stream=True)) as response:
                    answers.check_stream(self.url, response)
                    retries = 0  # from now on the stream says when to come back
                    for part in response.iter_bytes():
                        yield from stream.feed(part)
            except LOST as error:
                if not stream.has_spoken:
                    raise answers.ours(self.url, error) from error
            time.sleep(stream.pause_s())


class AsyncClient(_Connection):
    """One service, as `Client`, for programs with an event loop: what is a method there, is awaited here.

    `async for` reads runs, alerts and events. One client is for one event loop.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 10.0, retries: int = 3) -> None:
        super().__init__(url, token, timeout_s=timeout_s, retries=retries)
        self._http = httpx.AsyncClient(**self._options)
        self._loop: asyncio.AbstractEventLoop | None = None

    runs = _lists_async(calls.runs)
    find_run = _asks_async(calls.find_run)
    run = _asks_async(calls.run)
    series = _asks_async(calls.series)
    heatmap = _asks_async(calls.heatmap)
    compare = _asks_async(calls.compare)
    frame = _asks_async(calls.frame)
    alerts = _lists_async(calls.alerts)
    alert = _asks_async(calls.alert)
    acknowledge = _asks_async(calls.acknowledge)
    rules = _asks_async(calls.rules)
    rule = _asks_async(calls.rule)
    standing = _asks_async(calls.standing)
    test_rules = _asks_async(calls.test_rules)
    tags = _asks_async(calls.tags)
    glances = _asks_async(calls.glances)
    export = _saves_async(calls.export)
    events = _hears_async(calls.events)

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _stay_in_loop(self) -> None:
        """Connections belong to the event loop in which they were made. Raises InvalidArgument in another one."""
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise errors.InvalidArgument(
                "an AsyncClient belongs to the event loop in which it asked first; make one inside of each asyncio.run"
            )

    async def _talk(self, talk: Talk[T]) -> T:
        answer = None
        while True:
            try:
                request = talk.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = await self._answer(request)

    async def _answer(self, request: Request[R]) -> R:
        return self._read(request, await self._send(request, self._retries))

    async def _send(self, request: Request[Any], retries: int, *, stream: bool = False) -> httpx.Response:
        self._stay_in_loop()
        patience = answers.Patience(retries)
        while True:
            outcome: Outcome
            try:
                outcome = await self._http.send(self._asked(self._http, request), stream=stream)
                if not outcome.is_success:
                    async with aclosing(outcome):
                        await outcome.aread()
            except httpx.RequestError as error:
                outcome = error
            pause_s = patience.pause_s(request, outcome)
            if pause_s is None:
                return answers.accept(self.url, outcome)
            await asyncio.sleep(pause_s)

    async def _save(self, download: Download) -> Path:
        async with aclosing(await self._send(download.request, self._retries, stream=True)) as response:
            with download.opened() as file:
                try:
                    async for part in response.aiter_bytes():
                        file.write(part)
                except httpx.RequestError as error:
                    raise answers.ours(self.url, error) from error
        return download.path

    async def _hear(self, listening: Listening) -> AsyncGenerator[Event, None]:
        stream, retries = Stream(self._source), self._retries
        while True:
            try:
                async with aclosing(await self._send(listening.request, retries, stream=True)) as response:
                    answers.check_stream(self.url, response)
                    retries = 0
                    async for part in response.aiter_bytes():
                        for event in stream.feed(part):
                            yield event
            except LOST as error:
                if not stream.has_spoken:
                    raise answers.ours(self.url, error) from error
            await asyncio.sleep(stream.pause_s())
