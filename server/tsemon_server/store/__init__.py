"""Runs, frames and alerts in a database. The only place that knows SQL."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tsemon.stacks import Stacks
from tsemon_server.store.checking import check
from tsemon_server.store.engine import Database, Unit
from tsemon_server.store.group_commit import GroupCommit
from tsemon_server.store.ledger.attempts import standings
from tsemon_server.store.ledger.leases import SETTLING, drop_lease, hold_lease, note_done
from tsemon_server.store.ledger.notices import Notices
from tsemon_server.store.ledger.retention import Retention, RetentionChanges, Retentions
from tsemon_server.store.ledger.runs import Limits
from tsemon_server.store.ledger.tokens import Tokens as _Tokens
from tsemon_server.store.ledger.tombstones import forgotten_runs, remove_tombstone
from tsemon_server.store.reading import Reader
from tsemon_server.store.series import Left, Series
from tsemon_server.store.series.checks import Checked, Finding
from tsemon_server.store.series.settling import Sizes
from tsemon_server.store.series.sql import SqlSeries
from tsemon_server.store.streams import Standing, history_of, run_of
from tsemon_server.store.writing import Writer

log = logging.getLogger(__name__)

MOST_KNOWN = 100_000
"""Maximum number of attempts whose stacks are remembered."""

SILENCE_S = 3600.0
"""A run that was not heard of for so long sends no more, as far as the layout of its frames is concerned."""

NOTED_EVERY_S = 30.0
"""How often it is noted that all is settled."""
SLICE_PAGES = 500
"""So many pages of a SQLite file are given back in one transaction."""


class Store:
    """The database at `url`, migrated to what this version needs.

    Raises InvalidArgument where that is no URL of a database, StoreError where it cannot be used.

    Without `migrate`, one that is not there or of another version cannot. It takes up to `max_runs` runs,
    `max_project_runs` of one project, and `max_waiting` pieces of work that wait for a transaction. `series` makes the
    engine that keeps the frames.
    """

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.time,
        *,
        migrate: bool = True,
        max_runs: int = 100_000,
        max_project_runs: int = 20_000,
        max_waiting: int = 256,
        series: Callable[[Database], Series[Unit]] = SqlSeries,
    ) -> None:
        self._database = Database(url, migrate=migrate)
        self._series = series(self._database)
        self._clock, self._max_waiting = clock, max_waiting
        self._limits = Limits(max_runs, max_project_runs)
        self._opened_at = clock()
        self._settled_at = -math.inf
        # What never changes, for the id of a run is never given to another.
        self._stacks: dict[tuple[str, int], Stacks] = {}
        self._commits: GroupCommit[Writer] | None = None
        self._lock = threading.Lock()
        self.where = self._database.where
        self.notices = Notices(self._database, clock)
        self.tokens = _Tokens(self._database, clock)

    @contextmanager
    def read(self) -> Iterator[Reader]:
        """Everything read inside the block is of one state of the database."""
        with self._database.reading() as connection:
            yield Reader(Unit(connection), self._clock(), self._series)

    @contextmanager
    def write(self) -> Iterator[Writer]:
        """All that is written inside the block is committed when it ends, nothing of it when it raises."""
        with self._database.writing() as connection:
            unit = Unit(connection)
            writer = Writer(unit, self._clock(), self._series, self._limits)
            yield writer
            writer.finish()
            happened = list(writer.happened())
        for remember in unit.after_commit:
            remember()
        for event in happened:  # committed, so that it is true
            event.request.run(log.info, event.what, extra={"fields": event.fields})

    def ping(self) -> None:
        """Raise StoreError unless the database answers."""
        with self._database.reading() as connection:
            forgotten_runs(connection)

    def write_soon(self, key: str, work: Callable[[Writer], Any], size: int = 1) -> Future[Any]:
        """What `work` returns once it is committed, together with other work that comes at the same time.

        `key` is the id of the run that it writes to. Work of one key is done in order.

        It may be done twice, the first time for nothing: where other work of its transaction failed. `size` is how many
        frames it stores. Raises Busy where too much waits already.
        """
        with self._lock:
            if self._commits is None:
                self._commits = GroupCommit(self.write, self._database.num_writers, self._max_waiting)
        return self._commits.do(key, work, size)

    def stacks(self, run_id: str, attempt: int) -> Stacks:
        """The stacks of this attempt's model: they never change, and the database is asked once."""
        found = self.known_stacks(run_id, attempt)
        if found is None:
            with self.read() as reader:
                found = reader.runs.stacks(run_id, attempt)
            if len(self._stacks) >= MOST_KNOWN:
                self._stacks.clear()
            self._stacks[run_id, attempt] = found
        return found

    def known_stacks(self, run_id: str, attempt: int) -> Stacks | None:
        """The same where it was asked before, without a wait."""
        return self._stacks.get((run_id, attempt))

    def settle(self, is_stopped: Callable[[], bool] = lambda: False, *, sizes: Sizes | None = None) -> int:
        """Move settled frames into chunks, until there are no more or `is_stopped`; the number of segments.

        May run beside anything, also beside itself in another process.
        """
        silent_before = self._clock() - SILENCE_S

        def standing(series_ids: Collection[str]) -> Mapping[str, Standing]:
            with self._database.reading() as connection:
                found = standings(connection, {run_of(series_id) for series_id in series_ids}, silent_before)
            of_rows = {history_of(run_id): one._replace(newest=None) for run_id, one in found.items()}
            return {series_id: one for series_id, one in {**found, **of_rows}.items() if series_id in series_ids}

        return self._series.settle(standing, self._clock(), sizes or Sizes(), is_stopped)

    def note_settled(self, seconds: float) -> None:
        """Let others know that all is settled that had come before so many seconds ago. Written down now and then."""
        began_at = self._clock() - seconds
        if not 0 <= began_at - self._settled_at < NOTED_EVERY_S:
            with self._database.writing() as connection:
                note_done(connection, SETTLING, began_at)
            self._settled_at = began_at

    def purge(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Remove the frames of deleted runs and make the file shorter, a slice at a time, until `is_stopped`."""
        with self._database.reading() as connection:
            run_ids = forgotten_runs(connection)
        for run_id in run_ids:
            # The file last, so that whoever goes on with this goes on with the file, too.
            is_dropped = all(self._series.drop(each, is_stopped) for each in (run_id, history_of(run_id)))
            if not is_dropped or not self._shrink(is_stopped):
                return
            with self._database.writing() as connection:
                remove_tombstone(connection, run_id)

    def expire(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Drop what is older than its project keeps, a segment or a run at a time, until `is_stopped`."""
        now, opened_at = self._clock(), self._opened_at
        with self._database.reading() as connection:
            retention = Retentions(connection)
            kept = retention.all()
            runs = [(run_id, one) for one in kept for run_id in retention.aged_runs(one, now, opened_at)]
        for run_id, one in runs:
            if is_stopped():
                return
            with self._database.writing() as connection:
                is_gone = RetentionChanges(connection).forget_aged(run_id, one, now, opened_at)
            if is_gone:
                log.info("run expired", extra={"fields": {"run_id": run_id, "project": one.project}})
        is_reduced = [self._reduce(retention, now, is_stopped) for retention in kept]
        if any(is_reduced):
            self._shrink(is_stopped)

    def _reduce(self, retention: Retention, now: float, is_stopped: Callable[[], bool]) -> bool:
        """Drop samples and rollups that are too old; whether there were any."""

        def of_project(series_ids: Collection[str]) -> Collection[str]:
            with self._database.reading() as connection:
                found = Retentions(connection).of_project(retention.project, {run_of(each) for each in series_ids})
            return [each for each in series_ids if run_of(each) in found]

        ages: Sequence[tuple[Left, float | None]] = (("coarse", retention.rollups_s), ("fine", retention.samples_s))
        is_reduced = [
            self._series.reduce(left, now - age_s, of_project, is_stopped) for left, age_s in ages if age_s is not None
        ]
        return any(is_reduced)

    def check(self, report: Callable[[Finding], None]) -> Iterator[Checked]:
        """Recount everything, run by run, and report what is damaged. Reads only."""
        return check(self._database, self._series, report)

    def vacuum(self) -> tuple[int, int]:
        """Give back all space that holds nothing; the size in bytes before and after."""
        before = self._database.size_bytes()
        self._database.vacuum()
        return before, self._database.size_bytes()

    @property
    def gives_space_back(self) -> bool:
        """Whether it does so without `vacuum`: not with a file that an old version made."""
        return self._database.gives_back()

    def _shrink(self, is_stopped: Callable[[], bool]) -> bool:
        """Whether all space that is free could be given back."""
        while not is_stopped():
            if not self._database.give_back(SLICE_PAGES):
                self._database.checkpoint()
                return True
        return False

    def hold_lease(self, work: str, holder: str, seconds: float) -> bool:
        """Whether `holder` has the work for so long from now: it had it already, or nobody else has it now."""
        with self._database.writing() as connection:
            return hold_lease(connection, work, holder, self._clock(), seconds)

    def drop_lease(self, work: str, holder: str) -> None:
        """Let others have the work at once."""
        with self._database.writing() as connection:
            drop_lease(connection, work, holder)

    def close(self) -> None:
        if self._commits is not None:
            self._commits.close()
        self._database.close()
