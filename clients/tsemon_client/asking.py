"""A question as a value, and as a method of both clients: one waits for the answer, the other is awaited."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any, BinaryIO, Generic, ParamSpec, Protocol, TypeVar, overload

from tsemon_client.models import Event, Record, Records

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
M = TypeVar("M", bound=Record)
R = TypeVar("R", bound=Record)

PAGE = 200
"""Number of records requested at once."""


@dataclass(frozen=True)
class Request(Generic[M]):
    """One question, and what its answer is read as."""

    path: str
    model: type[M]
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the query string."""
    method: str = "GET"
    body: Mapping[str, Any] | None = None
    """Sent as JSON."""
    text: str | None = None
    """Sent as it is."""
    timeout_s: float | None = None
    """How long to wait for the answer, if not as long as the client waits for others."""
    is_idempotent: bool = True
    """Whether asking twice is the same as asking once, and no great work: then the client retries if no answer comes."""


Talk = Generator[Request[Any], Any, T]
"""Yields requests, is sent their answers, and returns what the caller wanted to know."""


@dataclass(frozen=True)
class Listing(Generic[R]):
    """A list that comes in pages, each of which says where the next one begins."""

    path: str
    page: type[Record]
    key: str
    """The field of the page with the records."""
    model: type[R]
    params: Mapping[str, Any]
    limit: int | None
    """Maximum number of records; None for all."""
    cursor: str | None = None
    """Where the list continues."""

    @property
    def request(self) -> Request[Any]:
        """The next page."""
        size = PAGE if self.limit is None else min(PAGE, self.limit)
        where = {} if self.cursor is None else {"cursor": self.cursor}
        return Request(self.path, self.page, {**self.params, "limit": size, **where})

    def records(self, page: Any) -> list[R]:
        """Those of a page."""
        found: list[R] = getattr(page, self.key)
        return found

    def after(self, page: Any) -> Listing[R] | None:
        """What follows; None if that was all, or enough."""
        left = None if self.limit is None else self.limit - len(self.records(page))
        if page.next_cursor is None or left == 0:
            return None
        return replace(self, limit=left, cursor=page.next_cursor)


@dataclass(frozen=True)
class Download:
    """What is written to a file as it comes."""

    request: Request[Any]
    path: Path

    @contextmanager
    def opened(self) -> Generator[BinaryIO, None, None]:
        """A file beside the path, which takes its place when the block ends well and is gone when it does not."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        try:
            with partial.open("wb") as file:
                yield file
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)


class Waits(Protocol):
    """A client whose methods return the answer."""

    def _answer(self, request: Request[M], /) -> M: ...


class Awaits(Protocol):
    """A client whose methods are awaited."""

    def _answer(self, request: Request[M], /) -> Coroutine[Any, Any, M]: ...


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

    def __init__(self, client: Waits, listing: Listing[R]) -> None:
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

    def __init__(self, client: Awaits, listing: Listing[R]) -> None:
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


class Method(Generic[P, T, A]):
    """A question as a method of both clients: it returns T from one that waits, and A from one that is awaited.

    `make` turns the arguments into a question, which the client's method `does` answers. Signature and docstring are those
    of `make`; `shape` is how help() shows the type that is returned.
    """

    def __init__(self, make: Callable[P, object], does: str, shape: str = "{}") -> None:
        self._make, self._does, self._shape = make, does, shape

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: Waits, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: Awaits, owner: type) -> Callable[P, A]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        make, does = self._make, getattr(owner, self._does)

        def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
            return does(self, make(*args, **kwargs))

        async def awaited(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
            return await does(self, make(*args, **kwargs))

        found: Any = awaited if inspect.iscoroutinefunction(does) else method
        found.__name__, found.__doc__ = self._name, make.__doc__
        found.__qualname__ = f"{owner.__name__}.{self._name}"
        signature = inspect.signature(make)
        _, _, returned = str(signature.return_annotation).removesuffix("]").partition("[")
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        found.__signature__ = signature.replace(
            parameters=[me, *signature.parameters.values()], return_annotation=self._shape.format(returned)
        )
        return found if client is None else MethodType(found, client)


def asks(make: Callable[P, Talk[T]]) -> Method[P, T, Coroutine[Any, Any, T]]:
    """One question, or several that depend on each other."""
    return Method(make, "_talk")


def lists(make: Callable[P, Listing[R]]) -> Method[P, Found[R], AsyncFound[R]]:
    """A list, page by page."""
    return Method(make, "_list", "Found[{}]")


def saves(make: Callable[P, Download]) -> Method[P, Path, Coroutine[Any, Any, Path]]:
    """A file."""
    return Method(make, "_save", "Path")


def hears(make: Callable[P, Request[Record]]) -> Method[P, Generator[Event, None, None], AsyncGenerator[Event, None]]:
    """A stream of events."""
    return Method(make, "_hear", "Generator[Event, None, None]")
