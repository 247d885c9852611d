"""Bodies of frames that wait to be stored: no more of them than are stored before their clients lose patience."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tsemon.errors import Busy

BODY_BYTES = 16 * 1024
"""Cost of a body besides its bytes (its head, its transaction, its reply), in bytes."""
FIRST_BYTES_PER_S = 8 * 2**20
"""Assumed speed of a server that has stored nothing yet."""
MEMORY_S = 10.0
"""The estimate looks so far back, in seconds in which something waited."""
ARRIVAL_S = 2.0
"""Time for which a body counts that is announced and does not come: a client that only announces bodies blocks no other."""
LONGEST_S = 10.0
"""Largest Retry-After. The server may be faster than the estimate, and would be idle."""
LARGE_BYTES = 16 * 2**20
"""If so much has waited together, the memory is given back once it is stored."""


class Backlog:
    """Estimates how long a body waits, from the bytes before it and the speed of the last seconds.

    For one event loop. `on_rest` is called when nothing waits any more after much has waited.
    """

    def __init__(
        self,
        patience_s: float,
        on_rest: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience_s, self._on_rest, self._clock = patience_s, on_rest, clock
        self._arriving: dict[Turn, float] = {}
        """Bodies that are announced and not here yet, each with the time until which it counts, in this order."""
        self._arriving_bytes = 0
        self._waiting_bytes = self._most_bytes = 0
        self._done_bytes, self._busy_s = float(FIRST_BYTES_PER_S), 1.0
        """Bytes stored, and the seconds in which bytes waited. Both decay."""
        self._busy_since = self._next_turn_at = clock()
        """When the last body was stored, or the first came after a rest."""

    @property
    def bytes_per_s(self) -> float:
        """Speed at which the server stores waiting bodies. It falls if they should all be stored by now."""
        if not self._waiting_bytes:
            return self._done_bytes / self._busy_s
        expected_s = self._waiting_bytes * self._busy_s / self._done_bytes
        late_s = max(0.0, self._clock() - self._busy_since - expected_s)
        return self._done_bytes / (self._busy_s + late_s)

    @property
    def wait_s(self) -> float:
        """How long a body would wait that is announced now."""
        self._forget_late_arrivals()
        return (self._waiting_bytes + self._arriving_bytes) / self.bytes_per_s

    @contextmanager
    def turn(self, announced_bytes: int) -> Iterator[Turn]:
        """Let a body come that is announced. Raises Busy if it would wait for too long."""
        turn = Turn(self, announced_bytes + BODY_BYTES)
        self._refuse_late(turn, self.wait_s)
        self._arriving[turn] = self._clock() + ARRIVAL_S
        self._arriving_bytes += turn.num_bytes
        try:
            yield turn
        except BaseException:
            self._leave(turn, is_stored=False)
            raise
        self._leave(turn, is_stored=True)

    def come(self, turn: Turn, num_bytes: int) -> None:
        """Note that the body is here. Raises Busy if other bodies came before it and it would wait for too long."""
        self._forget_arrival(turn)
        turn.num_bytes = num_bytes + BODY_BYTES
        self._refuse_late(turn, self._waiting_bytes / self.bytes_per_s)
        turn.is_here = True
        if not self._waiting_bytes:
            self._busy_since = self._clock()
        self._waiting_bytes += turn.num_bytes
        self._most_bytes = max(self._most_bytes, self._waiting_bytes)

    def _refuse_late(self, turn: Turn, wait_s: float) -> None:
        """Raises Busy if the body would wait for too long. The only body is taken however slow the server is."""
        own_s = turn.num_bytes / self.bytes_per_s
        if not wait_s or wait_s + own_s <= self._patience_s:
            return
        retry_after_s = self._next_turn(wait_s, own_s)
        raise Busy(
            f"bodies that take about {wait_s:.1f} s to store are before this one, and nothing waits for more than "
            f"{self._patience_s:g} s; send it again in {math.ceil(retry_after_s)} s",
            retry_after_s=retry_after_s,
        )

    def _next_turn(self, wait_s: float, own_s: float) -> float:
        """Seconds after which the body should come again: once half of the waiting bodies are stored, and after all
        bodies that were refused before it."""
        now = self._clock()
        at = max(self._next_turn_at, now + max(0.0, wait_s - self._patience_s / 2))
        self._next_turn_at = min(at + own_s, now + LONGEST_S)
        # If all turns up to the last one are taken, a random time in the second half spreads the rest.
        return at - now if at < now + LONGEST_S else LONGEST_S * random.uniform(0.5, 1.0)

    def _leave(self, turn: Turn, is_stored: bool) -> None:
        self._forget_arrival(turn)
        if not turn.is_here:
            return
        self._waiting_bytes -= turn.num_bytes
        if is_stored:
            self._note_stored(turn.num_bytes)
        if not self._waiting_bytes:
            if self._most_bytes >= LARGE_BYTES:
                self._on_rest()
            self._most_bytes = 0

    def _note_stored(self, num_bytes: int) -> None:
        now = self._clock()
        busy_s, self._busy_since = now - self._busy_since, now
        kept = math.exp(-busy_s / MEMORY_S)
        self._done_bytes = self._done_bytes * kept + num_bytes
        self._busy_s = self._busy_s * kept + busy_s

    def _forget_late_arrivals(self) -> None:
        now = self._clock()
        while self._arriving and (eldest := next(iter(self._arriving.items())))[1] <= now:
            self._forget_arrival(eldest[0])

    def _forget_arrival(self, turn: Turn) -> None:
        if self._arriving.pop(turn, None) is not None:
            self._arriving_bytes -= turn.num_bytes


class Turn:
    """A body's place in the backlog."""

    def __init__(self, backlog: Backlog, num_bytes: int) -> None:
        self._backlog, self.num_bytes = backlog, num_bytes
        self.is_here = False

    def come(self, num_bytes: int) -> None:
        """The body is here. Raises Busy if it would wait for too long."""
        self._backlog.come(self, num_bytes)
