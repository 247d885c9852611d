"""Connections: how many, and for how long one may keep us waiting.

uvicorn waits for ever for a head, for a body, and for whoever does not read what was asked for. It closes idle
connections, but only after a first request.

uvicorn has no public hook for any of this, so the classes here build on private ones of uvicorn. `pyproject.toml` excludes
versions newer than the one that was checked, and `tests/server/test_uvicorn.py` says what to check in the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tsemon.wire import MAX_BODY_BYTES
from tsemon_server.errors import problem_response
from tsemon_server.limits.admission import MAX_HEAD_BYTES, MAX_TARGET_BYTES
from tsemon_server.limits.values import Limits

log = logging.getLogger(__name__)

LOOK_EVERY = 5
"""Ticks of uvicorn, which last 0.1 s."""
BYTES_PER_S = 16 * 1024
"""A body that comes slower than this is not waited for."""
TAKEN_BYTES = 48 * 1024
"""Of an answer, to count as being read."""
MAX_UNSENT_BYTES = 256 * 2**20
"""Of all answers together that wait to be read. The largest goes first."""
UNSENT_BYTES = 128 * 1024
"""Of one connection, that the system keeps to be sent next."""
MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES
"""What is refused is read to its end, so that the answer arrives; but not for ever."""
MAX_PIPELINED = 8
"""Requests that come before the answer to the one before."""
BACKLOG = 512
"""Connections that the system takes for us meanwhile, and hands over at one go."""
_OWN_FILES = 256
"""Descriptors for databases, libraries and what else a process opens."""


class Watch:
    """Which connections keep us waiting."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: dict[Connection, None] = {}
        """Those whose client has the word, whoever had it first at the front."""

    def look(self, now: float, connections: list[Any]) -> None:
        """End those that take too long."""
        for connection in [connection for connection in self.waiting if connection.is_overdue(now)]:
            connection.give_up()
        unsent = [
            (size_bytes, connection)
            for connection in connections
            if isinstance(connection, Connection) and (size_bytes := connection.unsent_bytes(now))
        ]
        excess = sum(size_bytes for size_bytes, _ in unsent) - MAX_UNSENT_BYTES
        if excess > 0:
            for size_bytes, connection in sorted(unsent, key=lambda pair: -pair[0]):
                connection.cut()
                excess -= size_bytes
                if excess <= 0:
                    break

    def make_room(self, newest: Connection) -> None:
        """Let go whoever keeps us waiting for longest, be it the newest."""
        eldest = next(iter(self.waiting))
        if eldest is newest:
            newest.refuse(503, "busy", "all connections are in use; come again later")
        else:
            eldest.cut()


class BoundedState(ServerState):
    """What uvicorn hands to each connection, and a watch over them."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.watch = Watch(limits)


class BoundedServer(Server):
    """uvicorn's, with an eye on its connections. Its config needs `http=Connection`.

    `on_exit` ends answers that would go on for ever, for which it would wait when it is told to stop.
    """

    def __init__(self, config: Config, limits: Limits, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit
        self.server_state: BoundedState = BoundedState(limits)

    async def on_tick(self, counter: int) -> bool:
        if counter % LOOK_EVERY == 0:
            connections = list(self.server_state.connections)
            if connections:
                self.server_state.watch.look(connections[0].loop.time(), connections)
        must_exit = await super().on_tick(counter)
        if must_exit:
            self._on_exit()
        return must_exit


class Connection(HttpToolsProtocol):
    """One that is ended when it keeps us waiting, sends an endless head, or does not read."""

    def __init__(
        self, config: Config, server_state: BoundedState, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._watch = server_state.watch
        self._limits = server_state.watch.limits
        self._is_head = True
        """Whether the head of a request is not complete."""
        self._since = 0.0
        self._num_received = 0
        self._unsent_bytes = 0
        self._unsent_since = 0.0
        self._unanswered: list[RequestResponseCycle] = []

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self._limits.connections:
            self._watch.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.waiting.pop(self, None)
        for cycle in self._unanswered:  # uvicorn tells the newest of them only
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._num_received += len(data)
        if self._is_head and self._num_received > MAX_HEAD_BYTES + MAX_TARGET_BYTES:
            self.refuse(431, "headers_too_large", f"expected at most {MAX_HEAD_BYTES} bytes of headers, got more")
        elif self._num_received > MAX_DISCARDED_BYTES:
            self.cut()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at a time")  # which httptools and uvicorn turn into a 400
        self._is_head, self._num_received, self._since = False, 0, self.loop.time()
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in (*self._unanswered, self.cycle) if not cycle.response_complete]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:  # refused before all of it had come
            self._wait()
        else:
            self._watch.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Unless another request came meanwhile, or the rest of a body that was refused is still to come.
        if self.cycle.response_complete and self not in self._watch.waiting and not self.transport.is_closing():
            self._wait()

    def resume_writing(self) -> None:
        self._unsent_bytes = 0
        super().resume_writing()

    def is_overdue(self, now: float) -> bool:
        """Whether what it has to send should be here by now."""
        allowed_s = self._limits.head_s if self._is_head else self._limits.body_s + self._num_received / BYTES_PER_S
        return now - self._since > allowed_s

    def unsent_bytes(self, now: float) -> int:
        """What waits to be read. Cuts the connection where nobody does."""
        size_bytes: int = self.transport.get_write_buffer_size()
        if size_bytes == 0 or self._unsent_bytes == 0 or size_bytes <= self._unsent_bytes - TAKEN_BYTES:
            self._unsent_bytes, self._unsent_since = size_bytes, now
        elif size_bytes > self._unsent_bytes:
            self._unsent_bytes = size_bytes
        elif now - self._unsent_since > self._limits.send_s:
            self.cut()
            return 0
        return size_bytes

    def give_up(self) -> None:
        """Tell a client that it was too slow, if it has said anything."""
        if self._is_head and not self._num_received:
            self.cut()
        elif self._is_head:
            self.refuse(408, "too_slow", f"expected a head within {self._limits.head_s} s; send it again")
        else:
            self.refuse(
                408,
                "too_slow",
                f"expected a body within {self._limits.body_s} s and 1 s for each 16 KiB; send it again",
            )

    def refuse(self, status: int, code: str, detail: str) -> None:
        """Answer past the app, and hang up."""
        self._watch.waiting.pop(self, None)
        cycle = self.cycle
        may_speak = cycle is None or (cycle.response_complete if self._is_head else not cycle.response_started)
        if self.transport.is_closing() or not may_speak:
            self.cut()
            return
        response = problem_response(status, code, detail, {"Connection": "close"})
        head = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
        self.transport.write(b"HTTP/1.1 %d \r\n%s\r\n%s" % (status, head, response.body))
        self.transport.close()

    def cut(self) -> None:
        """Hang up without a word; what was not sent is lost."""
        self._watch.waiting.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def _wait(self) -> None:
        """From now on the client has the word."""
        self._is_head, self._num_received, self._since = True, 0, self.loop.time()
        self._watch.waiting.pop(self, None)
        self._watch.waiting[self] = None


def num_connections(limits: Limits) -> int:
    """How many connections the system lets this process have, of those that it may have.

    Raises the process's own limit of open files where that is allowed.
    """
    try:
        import resource
    except ImportError:  # no such limit on this system
        return limits.connections
    wanted = limits.connections + BACKLOG + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits.connections
    possible = max(16, soft - BACKLOG - _OWN_FILES)
    log.warning(
        "%d open files are allowed: at most %d connections are taken, not %d", soft, possible, limits.connections
    )
    return possible
