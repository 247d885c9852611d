"""Work that the service does again and again by itself: one process at a time, on a thread of its own."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tsemon.errors import StoreError
from tsemon_server.store import Store

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""How long the others wait for a process that has the work and is not heard of."""

Work = Callable[[Callable[[], bool]], object]
"""Gets what to ask, between two pieces of it, whether to stop."""


class Rounds:
    """A thread that does each of `works` in turn, from `start` to `stop`. `name` tells the work from others."""

    def __init__(
        self, store: Store, name: str, works: Sequence[Work], pause_s: float, lease_s: float = LEASE_S
    ) -> None:
        self._store, self._name, self._works = store, name, works
        self._pause_s, self._lease_s = pause_s, lease_s
        self._holder = f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._renew_at = 0.0
        self._is_waiting = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tsemon-{name}", daemon=True)

    def start(self) -> None:
        with suppress(StoreError):  # later, then
            self._must_end()  # takes the work from the first moment on: a restore asks whether somebody has it
        self._thread.start()

    def stop(self) -> None:
        """Return once nothing is under way any more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._pause_s):
            # One after the other, so that one that fails does not keep the others from their turn.
            for work in self._works:
                self._do(work)
        with suppress(StoreError):  # it runs out
            self._store.drop_lease(self._name, self._holder)

    def _do(self, work: Work) -> None:
        try:
            if not self._must_end():
                work(self._must_end)
            if self._is_waiting:
                log.warning("%s goes on", self._name)
            self._is_waiting = False
        except StoreError as error:
            if not self._is_waiting:  # said once an outage
                log.warning("%s waits: %s", self._name, error)
            self._is_waiting = True
        except Exception:
            log.exception("%s failed; it is tried again", self._name)

    def _must_end(self) -> bool:
        """Asked between two pieces of work: whether to stop, or whether another process has it."""
        if time.monotonic() >= self._renew_at and self._store.hold_lease(self._name, self._holder, self._lease_s):
            self._renew_at = time.monotonic() + self._lease_s / 2
        return self._stopped.is_set() or time.monotonic() >= self._renew_at
