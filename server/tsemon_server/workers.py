"""Several processes that do the same work, for one core is not enough for some."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

PAUSE_S = 1.0
"""Before a worker that ended is replaced: what ended it may last."""

_spawning = multiprocessing.get_context("spawn")


class Worker(NamedTuple):
    """One of the processes."""

    number: int
    """From 0. One that replaces another has its number."""
    folder: Path
    """For what they have in common. It is gone when they end."""


def run_workers(num_workers: int, work: Callable[..., None], *args: Any) -> None:
    """Run `work(worker, *args)` in so many processes until SIGTERM or SIGINT; one that ends before that is replaced."""
    stopping = threading.Event()
    workers: dict[int, SpawnProcess] = {}

    def stop(*_: Any) -> None:
        stopping.set()
        for worker in list(workers.values()):
            worker.terminate()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    with TemporaryDirectory(prefix="tsemon-workers-", ignore_cleanup_errors=True) as folder:
        while not stopping.is_set():
            for number in range(num_workers):
                if number not in workers and not stopping.is_set():
                    workers[number] = _started(work, Worker(number, Path(folder)), *args)
            wait([worker.sentinel for worker in workers.values()], timeout=PAUSE_S)
            if any(not worker.is_alive() for worker in workers.values()):
                time.sleep(PAUSE_S)
            for number in [number for number, worker in workers.items() if not worker.is_alive()]:
                del workers[number]
        _join(workers.values())


def _join(workers: Iterable[SpawnProcess]) -> None:
    for worker in workers:
        worker.terminate()  # it may have been started after the signal came
        worker.join()


def _started(work: Callable[..., None], place: Worker, *args: Any) -> SpawnProcess:
    worker = _spawning.Process(target=_work_while_parent_lives, args=(work, place, *args))
    worker.start()
    return worker


def _work_while_parent_lives(work: Callable[..., None], place: Worker, *args: Any) -> None:
    threading.Thread(target=_end_with_parent, args=(place.folder,), name="tsemon-parent", daemon=True).start()
    work(place, *args)


def _end_with_parent(folder: Path) -> None:
    # Or the workers of a parent that was killed would keep its port, and leave its folder.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
