"""Memory that a burst has left behind.

glibc keeps what was freed, in a heap for each thread, for as long as anything above it is in use. After a burst of bodies
that is hundreds of megabytes, for which there is no use until the next one.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from contextlib import suppress

REST_S = 2.0
"""So long after the last body of a burst; its replies have left by then."""


def give_back_soon() -> None:
    """Give back to the system what nobody uses, in a moment and on another thread."""
    timer = threading.Timer(REST_S, give_back)
    timer.daemon = True
    timer.start()


def give_back() -> bool:
    """Give back to the system what nobody uses; whether there was any. Other libraries of C do so by themselves."""
    gc.collect()
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).malloc_trim(0))
    return False
