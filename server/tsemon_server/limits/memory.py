"""Returns the memory of a burst to the operating system.

glibc keeps freed memory, in a heap for each thread, for as long as anything above it is in use. After a burst of bodies
that is hundreds of megabytes, which stay unused until the next burst.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from contextlib import suppress

REST_S = 2.0
"""Pause after the last body of a burst. The replies are sent by then."""


def give_back_soon() -> None:
    """Return unused memory after a pause, on another thread."""
    timer = threading.Timer(REST_S, give_back)
    timer.daemon = True
    timer.start()


def give_back() -> bool:
    """Return unused memory to the operating system; True if there was any. Only glibc needs to be asked."""
    gc.collect()
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).malloc_trim(0))
    return False
