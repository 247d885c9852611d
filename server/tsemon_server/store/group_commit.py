"""Work that comes at the same time shares a transaction: one commit, one wait for the disk."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Self, TypeVar

from tsemon.errors import Busy, StoreError

Tool = TypeVar("Tool")
MOST = 64
"""So many pieces of work share a transaction at most: the last one waits for the first."""

MOST_SIZE = 1024
"""And so much, in sizes that callers give: the last piece may go beyond it."""


class Rest(ABC):
    """What is left of a piece of work, and is done for all pieces of a transaction together."""

    @classmethod
    @abstractmethod
    def finish(cls, rests: Sequence[Self]) -> Sequence[Any]:
        """Do it; the results of the pieces."""


class _Job(NamedTuple):
    key: str
    do: Callable[[Any], Any]
    done: Future[Any]
    context: Context
    """Of who asked: it knows the id of the request."""
    size: int


class GroupCommit(Generic[Tool]):
    """Does work in transactions that `begin` gives, on threads of its own. Work of one key is done in order.

    What comes while a transaction is under way shares the next. Nothing is answered before it is committed. Where a piece
    of work fails, the transaction is undone and each piece has one of its own: so work must be repeatable until then.
    Where the database fails, all of them fail. A piece of work may return a `Rest`, which is finished before the next piece
    of its key begins.
    """

    def __init__(
        self, begin: Callable[[], AbstractContextManager[Tool]], num_threads: int, max_waiting: int = 256
    ) -> None:
        self._begin, self._max_waiting = begin, max_waiting
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(num_threads)]
        self._threads = [threading.Thread(target=self._run, args=(queue,), daemon=True) for queue in self._queues]
        for thread in self._threads:
            thread.start()

    def do(self, key: str, work: Callable[[Tool], Any], size: int = 1) -> Future[Any]:
        """What `work` returns, once that is committed. Raises Busy where `max_waiting` wait for the same thread."""
        queue = self._queues[hash(key) % len(self._queues)]
        if queue.qsize() >= self._max_waiting:
            raise Busy(f"{self._max_waiting} bodies wait for the database already; send it again later")
        job = _Job(key, work, Future(), copy_context(), size)
        queue.put(job)
        return job.done

    def close(self) -> None:
        """Return once all is done that came before."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, queue: SimpleQueue[_Job | None]) -> None:
        while (job := queue.get()) is not None:
            jobs, size = [job], job.size
            while len(jobs) < MOST and size < MOST_SIZE and (more := _next(queue)) is not None:
                jobs.append(more)
                size += more.size
            wanted = [job for job in jobs if job.done.set_running_or_notify_cancel()]
            self._commit(sorted(wanted, key=lambda job: job.key))  # as other processes lock: they wait in no ring

    def _commit(self, jobs: Sequence[_Job]) -> None:
        if not jobs:
            return
        try:
            with self._begin() as tool:
                results = _results(jobs, tool)
        except BaseException as error:
            if len(jobs) == 1 or isinstance(error, StoreError):  # alone they would wait for the database one by one
                for job in jobs:
                    job.done.set_exception(error)
            else:
                for job in jobs:
                    self._commit([job])
            return
        for job, result in zip(jobs, results, strict=True):
            job.done.set_result(result)


def _results(jobs: Sequence[_Job], tool: Any) -> list[Any]:
    results: list[Any] = []
    unfinished: dict[str, int] = {}
    for place, job in enumerate(jobs):
        if job.key in unfinished:
            _finish(results, unfinished)
        results.append(job.context.run(job.do, tool))
        if isinstance(results[-1], Rest):
            unfinished[job.key] = place
    _finish(results, unfinished)
    return results


def _finish(results: list[Any], unfinished: dict[str, int]) -> None:
    by_kind: dict[type[Rest], list[int]] = {}
    for place in unfinished.values():
        by_kind.setdefault(type(results[place]), []).append(place)
    for kind, places in by_kind.items():
        for place, result in zip(places, kind.finish([results[place] for place in places]), strict=True):
            results[place] = result
    unfinished.clear()


def _next(queue: SimpleQueue[_Job | None]) -> _Job | None:
    """What waits already. The sign to end is left for later."""
    try:
        job = queue.get_nowait()
    except Empty:
        return None
    if job is None:
        queue.put(None)
    return job
