"""Runs, frames and alerts in a database. The only place that knows SQL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tsemon_server.store.engine import Database
from tsemon_server.store.packing import Kind
from tsemon_server.store.reading import FiringAlert, LiveRun, Place, Reader, RunOrder, Samples
from tsemon_server.store.records import Alert, Attempt, Latest, Record, Recorded, Run, RunDetail
from tsemon_server.store.writing import Added, Registration, RuleState, Writer

__all__ = [
    "Added",
    "Alert",
    "Attempt",
    "FiringAlert",
    "Kind",
    "Latest",
    "LiveRun",
    "Place",
    "Reader",
    "Record",
    "Recorded",
    "Registration",
    "RuleState",
    "Run",
    "RunDetail",
    "RunOrder",
    "Samples",
    "Store",
    "Writer",
]


class Store:
    """The database at `url`, migrated to what this version needs. Raises StoreError where it cannot be used."""

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        self._database = Database(url)
        self._clock = clock
        self.where = self._database.where

    @contextmanager
    def read(self) -> Iterator[Reader]:
        """Everything read inside the block is of one state of the database."""
        with self._database.reading() as connection:
            yield Reader(connection)

    @contextmanager
    def write(self) -> Iterator[Writer]:
        """All that is written inside the block is committed when it ends, nothing of it when it raises."""
        with self._database.writing() as connection:
            yield Writer(connection, self._clock())

    def close(self) -> None:
        self._database.engine.dispose()
