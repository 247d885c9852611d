"""What changes in the database, looked up once for all that listen.

The database tells, and not the code that writes: with several processes, what one of them writes is heard in all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from tsemon.errors import Busy, StoreError
from tsemon_answers.events import EventKind
from tsemon_server.store import Store

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Also the most often that one run is told of."""
REST_RATIO = 10
"""The pause after a look that took long, in lengths of that look."""
OVERLAP_S = 10.0
"""So far before the last look each one begins: changes are dated before they are committed, and clocks differ."""
GAP_S = 120.0
"""What came before a look that late is not gathered: it would be ever more. Who listens comes again, and reads anew."""
MAX_WAITING = 5000
"""Events that wait for a listener, the newest one of each run and alert. One that takes them slower is sent away."""


class Event(NamedTuple):
    """Something that has changed, and whose it is."""

    kind: str
    """run, alert or deleted."""
    id: str
    """Of that."""
    run_id: str
    project: str
    data: str
    """JSON."""


class Listener:
    """What one who listens has not heard yet."""

    def __init__(self, run_ids: frozenset[str], project: str | None, kinds: frozenset[EventKind] = frozenset()) -> None:
        self.run_ids, self._project, self._kinds = run_ids, project, kinds
        self._waiting: dict[tuple[str, str], Event] = {}
        self._woken = asyncio.Event()
        self.is_over = False
        """Whether nothing more will come: it comes again, and reads anew what it shows."""

    def offer(self, event: Event) -> None:
        """Keep it for `take`, in place of what is older about the same, if it is of what this one listens to."""
        if self.run_ids and event.run_id not in self.run_ids:
            return
        if self._kinds and event.kind not in self._kinds:
            return
        if self._project not in (None, event.project):
            return
        self._waiting[event.kind, event.id] = event
        if len(self._waiting) > MAX_WAITING:
            self.end()
        self._woken.set()

    def lose(self, run_id: str) -> None:
        """Tell once that a run is no more that this one listens to."""
        self.run_ids -= {run_id}
        data = json.dumps({"run_id": run_id}, separators=(",", ":"))
        self._waiting["deleted", run_id] = Event("deleted", run_id, run_id, "", data)
        if not self.run_ids:  # or it would listen to all there are
            self.is_over = True
        self._woken.set()

    def end(self) -> None:
        self.is_over = True
        self._woken.set()

    async def take(self, timeout_s: float) -> list[Event]:
        """What has come, at the latest after so long: then nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return []
        self._woken.clear()
        taken = [*self._waiting.values()]
        self._waiting.clear()
        return taken


class Feed:
    """Looks for what is new in `store`, as long as somebody listens. At most `most` do.

    `written_in` tells of runs that were written in the last seconds, so many, but not dated so.
    """

    def __init__(
        self,
        store: Store,
        most: int,
        clock: Callable[[], float],
        written_in: Callable[[float], Collection[str]] | None = None,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._store, self._most, self._clock, self._look_every_s = store, most, clock, look_every_s
        self._written_in = written_in
        self._listeners: set[Listener] = set()
        self._looking: asyncio.Task[None] | None = None
        self._told: dict[tuple[str, str], str] = {}
        """What was told of each run and alert that has changed lately."""
        self._is_waiting = False

    @contextmanager
    def listening(
        self, run_ids: frozenset[str], project: str | None, kinds: frozenset[EventKind] = frozenset()
    ) -> Iterator[Listener]:
        """To all runs, or to these; of all projects, or of this one; to events of all kinds, or of these. Raises Busy."""
        if len(self._listeners) >= self._most:
            raise Busy(f"{len(self._listeners)} listen to events, no more at once; ask again now and then instead")
        listener = Listener(run_ids, project, kinds)
        self._listeners.add(listener)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look_on())
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    def end(self) -> None:
        """Send all away: the service stops, or has not looked for long. In the event loop's thread."""
        for listener in self._listeners:
            listener.end()

    async def _look_on(self) -> None:
        self._told = {}  # so that the first look tells of the last seconds: whoever came read them, or hears of them
        looked_at = self._clock()
        while self._listeners:
            began, now = time.monotonic(), self._clock()
            if now - looked_at > GAP_S:
                self.end()
                looked_at = now
            since = min(looked_at, now) - OVERLAP_S  # a clock may be set back
            named = frozenset().union(*(listener.run_ids for listener in self._listeners))
            try:
                events, gone = await run_in_threadpool(self._look, named, since)
                looked_at = now
                for listener in self._listeners:
                    for event in events:
                        listener.offer(event)
                    for run_id in gone & listener.run_ids:
                        listener.lose(run_id)
                self._is_waiting = False
            except StoreError as error:
                if not self._is_waiting:  # said once an outage
                    log.warning("who listens to events hears nothing: %s", error)
                self._is_waiting = True
            except Exception:
                log.exception("looking for events failed; it is tried again")
            await asyncio.sleep(max(self._look_every_s, REST_RATIO * (time.monotonic() - began)))
        self._looking = None

    def _look(self, named: frozenset[str], since: float) -> tuple[list[Event], frozenset[str]]:
        """What has changed since then and was not told, and which of the runs listened to by name there are no more."""
        written = () if self._written_in is None else self._written_in(self._clock() - since)
        with self._store.read() as reader:
            alerts = reader.alerts.changed_since(since, written)
            runs = reader.runs.changed_since(since, {*written, *(alert.run_id for alert in alerts)})
            gone = reader.runs.missing(named)
        found = [Event("run", run.run_id, run.run_id, run.project, run.model_dump_json()) for run in runs]
        found += [Event("alert", one.alert_id, one.run_id, one.project, one.model_dump_json()) for one in alerts]
        events = [event for event in found if self._told.get((event.kind, event.id)) != event.data]
        self._told = {(event.kind, event.id): event.data for event in found}
        return events, gone
