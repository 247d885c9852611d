"""What the service does with its database by itself, beside the requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from tsemon_server.rounds import LEASE_S, Rounds
from tsemon_server.store import Store

PAUSE_S = 5.0
"""Between two rounds."""


class Housekeeping(Rounds):
    """A thread that keeps the database in shape."""

    def __init__(self, store: Store, pause_s: float = PAUSE_S, lease_s: float = LEASE_S) -> None:
        super().__init__(
            store, "housekeeping", (self._settle, store.expire, store.purge, store.notices.forget_old), pause_s, lease_s
        )

    def _settle(self, is_stopped: Callable[[], bool]) -> None:
        began = time.monotonic()
        self._store.settle(is_stopped)
        if not is_stopped():
            self._store.note_settled(time.monotonic() - began)
