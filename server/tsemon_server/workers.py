"""Several processes that do the same work, for one core is not enough for some."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

PAUSE_S = 1.0
"""Before a worker that ended is replaced: what ended it may last."""

_spawning = multiprocessing.get_context("spawn")


def run_workers(num_workers: int, work: Callable[..., None], *args: Any) -> None:
    """Run `work(*args)` in so many processes until SIGTERM or SIGINT; one that ends before that is replaced."""
    stopping = threading.Event()
    workers: list[SpawnProcess] = []

    def stop(*_: Any) -> None:
        stopping.set()
        for worker in workers:
            worker.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while not stopping.is_set():
        while len(workers) < num_workers and not stopping.is_set():
            workers.append(_started(work, *args))
        wait([worker.sentinel for worker in workers], timeout=PAUSE_S)
        if any(not worker.is_alive() for worker in workers):
            time.sleep(PAUSE_S)
        workers[:] = [worker for worker in workers if worker.is_alive()]
    for worker in workers:
        worker.terminate()  # it may have been started after the signal came
        worker.join()


def _started(work: Callable[..., None], *args: Any) -> SpawnProcess:
    worker = _spawning.Process(target=_work_while_parent_lives, args=(work, *args))
    worker.start()
    return worker


def _work_while_parent_lives(work: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=_end_with_parent, name="tsemon-parent", daemon=True).start()
    work(*args)


def _end_with_parent() -> None:
    # Or the workers of a parent that was killed would keep its port.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
