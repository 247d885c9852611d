"""Two clients for the same calls: one waits, one is awaited.

What can be asked, and how, stands in `calls`; what an answer means in `answers`. Here is only how a request is sent.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from tsemon import errors
from tsemon.wire import API
from tsemon_answers.record import Record
from tsemon_answers.runs import Source
from tsemon_answers.series import Heatmap
from tsemon_client import answers
from tsemon_client.asking import AsyncFound, Download, Found, Listing, Request, Talk
from tsemon_client.calls import Calls
from tsemon_client.live import Stream
from tsemon_client.models import Event, Incident

T = TypeVar("T")
R = TypeVar("R", bound=Record)
Outcome = httpx.Response | httpx.RequestError
LOST = (httpx.RequestError, *errors.UNANSWERED)
"""Ways in which a stream of events ends that coming back later may mend."""

MAX_TIMEOUT_S = 86_400.0


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

    _kind: type[httpx.Client] | type[httpx.AsyncClient]
    _http: Any

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
        self._source = Source(self._show_heatmap, self._show_incidents)
        self._http = self._kind(
            base_url=self.url + API,
            timeout=timeout_s,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            # As training does it: straight to the service, so that the token goes nowhere else, and trusting what the
            # system trusts or SSL_CERT_FILE names.
            trust_env=False,
            verify=ssl.create_default_context(),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _asked(self, request: Request[Any]) -> httpx.Request:
        """A request as httpx takes it. Raises InvalidArgument where the client is closed."""
        if self._http.is_closed:
            raise errors.InvalidArgument("the client is closed; make another one")
        timeout = httpx.Timeout(self._timeout_s, read=request.timeout_s or self._timeout_s)
        try:
            asked: httpx.Request = self._http.build_request(
                request.method,
                request.path,
                params=request.params,
                json=request.body,
                content=request.text,
                timeout=timeout,
            )
            return asked
        except httpx.InvalidURL as error:
            raise errors.InvalidArgument(f"what was asked for has no address: {error}") from error

    def _read(self, request: Request[R], response: httpx.Response) -> R:
        return answers.read(self.url, request.model, response, self._source)

    def _show_heatmap(self, run_id: str, metric: str) -> Heatmap:
        """For a notebook that shows a run, whichever client read it, and whether that is closed by now."""
        with Client(self.url, self._token, timeout_s=self._timeout_s, retries=0) as client:
            return client.heatmap(run_id, metric)

    def _show_incidents(self, run_id: str) -> list[Incident]:
        with Client(self.url, self._token, timeout_s=self._timeout_s, retries=0) as client:
            return client.incidents(run_id=run_id).all()


class Client(_Connection, Calls):
    """One service, at `url`; `token`, or TSEMON_TOKEN, is for one that asks for it.

    A question is asked again, up to `retries` times and after longer and longer pauses, where no answer comes within
    `timeout_s` or the service or a proxy is busy (429, 502, 503, 504); Retry-After is respected, up to 30 s.

    Goes straight to the host in `url`: no redirect is followed, no proxy or password read from the environment. https
    checks the certificate, with what the system trusts or the file that SSL_CERT_FILE names.

    Raises what the service says as the class of that error in `tsemon.errors`; ServerUnreachable when it says nothing.
    One client may be used by several threads.
    """

    _kind = httpx.Client
    _http: httpx.Client

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _talk(self, talk: Talk[T]) -> T:
        answer = None
        while True:
            try:
                request = talk.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = self._answer(request)

    def _list(self, listing: Listing[R]) -> Found[R]:
        return Found(self, listing)

    def _answer(self, request: Request[R]) -> R:
        return self._read(request, self._send(request, self._retries))

    def _send(self, request: Request[Any], retries: int, *, stream: bool = False) -> httpx.Response:
        """The answer, which is no error; of a stream only its head."""
        patience = answers.Patience(retries)
        while True:
            outcome: Outcome
            try:
                outcome = self._http.send(self._asked(request), stream=stream)
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

    def _hear(self, request: Request[Any]) -> Generator[Event, None, None]:
        stream, retries = Stream(self._source), self._retries
        while True:
            try:
                with closing(self._send(request, retries, stream=True)) as response:
                    answers.check_stream(self.url, response)
                    retries = 0  # from now on the stream says when to come back
                    for part in response.iter_bytes():
                        yield from stream.feed(part)
            except LOST as error:
                if not stream.has_spoken:
                    raise answers.ours(self.url, error) from error
            time.sleep(stream.pause_s())


class AsyncClient(_Connection, Calls):
    """One service, as `Client`, for programs with an event loop: what is a method there, is awaited here.

    `async for` reads runs, alerts and events. One client is for one event loop.
    """

    _kind = httpx.AsyncClient
    _http: httpx.AsyncClient
    _loop: asyncio.AbstractEventLoop | None = None

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
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

    def _list(self, listing: Listing[R]) -> AsyncFound[R]:
        return AsyncFound(self, listing)

    async def _answer(self, request: Request[R]) -> R:
        return self._read(request, await self._send(request, self._retries))

    async def _send(self, request: Request[Any], retries: int, *, stream: bool = False) -> httpx.Response:
        self._stay_in_loop()
        patience = answers.Patience(retries)
        while True:
            outcome: Outcome
            try:
                outcome = await self._http.send(self._asked(request), stream=stream)
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

    async def _hear(self, request: Request[Any]) -> AsyncGenerator[Event, None]:
        stream, retries = Stream(self._source), self._retries
        while True:
            try:
                async with aclosing(await self._send(request, retries, stream=True)) as response:
                    answers.check_stream(self.url, response)
                    retries = 0
                    async for part in response.aiter_bytes():
                        for event in stream.feed(part):
                            yield event
            except LOST as error:
                if not stream.has_spoken:
                    raise answers.ours(self.url, error) from error
            await asyncio.sleep(stream.pause_s())
