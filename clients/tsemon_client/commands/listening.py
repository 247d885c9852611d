"""When to look again: as soon as the service says that something changed, and else every few seconds."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from tsemon.errors import TsemonError

if TYPE_CHECKING:
    from tsemon_client import Client

POLL_S = 2.0
"""Between looks where the service does not say when something changes."""
QUIET_S = 5.0
"""Between looks where it does: for what it has no event for, such as a service that is gone."""
GATHER_S = 0.2
"""After the first change: what comes together is looked at once."""


def looks(client: Client, run_ids: Sequence[str]) -> Iterator[None]:
    """Yields at once, and whenever it is time to look again."""
    heard: queue.Queue[bool] = queue.Queue()
    # A daemon: it waits for the service, and nobody waits for it.
    threading.Thread(target=_listen, args=(client, run_ids, heard), name="tsemon-events", daemon=True).start()
    pause_s = POLL_S
    yield
    while True:
        with suppress(queue.Empty):
            is_listening = heard.get(timeout=pause_s)
            time.sleep(GATHER_S)
            while not heard.empty():
                is_listening = heard.get_nowait()
            pause_s = QUIET_S if is_listening else POLL_S
        yield


def _listen(client: Client, run_ids: Sequence[str], heard: queue.Queue[bool]) -> None:
    try:
        for _ in client.events(*run_ids):
            heard.put(True)
    except (TsemonError, RuntimeError):  # no such route, or the client was closed
        heard.put(False)
