"""What goes wrong inside tsemon while a run trains."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from tsemon.errors import InvalidArgument

log = logging.getLogger("tsemon")

MAX_LOGGED_TRACES = 1


class Faults:
    """What went wrong inside tsemon: counted, kept for the status, logged a few times, never raised."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[str] = deque(maxlen=20)
        self._lock = threading.Lock()  # the exporter's threads warn, too

    @property
    def recent(self) -> tuple[str, ...]:
        """The last texts, each once, the newest last."""
        with self._lock:
            return tuple(self._recent)

    def contain(self, error: Exception) -> None:
        self.count += 1
        if type(error) is InvalidArgument:  # a mistake of the user
            self.warn(str(error))
        else:
            self.warn(f"contained in tsemon, training is not affected: {type(error).__name__}: {error}", cause=error)

    def warn(self, text: str, cause: Exception | None = None) -> None:
        with self._lock:
            is_new = text not in self._recent
            if is_new:
                self._recent.append(text)
        if is_new:
            with contextlib.suppress(Exception):  # a handler or filter of the user's own may raise
                log.warning("tsemon: %s", text, exc_info=cause if self.count <= MAX_LOGGED_TRACES else None)

    def guard(self, function: Callable[..., object], *args: object) -> None:
        try:
            function(*args)
        except Exception as error:
            self.contain(error)
