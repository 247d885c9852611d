"""The page that Prometheus scrapes.

Runs are read from the database, not from memory, so that any number of processes give the same answer.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from tsemon import __version__
from tsemon_server.exposition.meters import Meters
from tsemon_server.exposition.runs import Templates, shown
from tsemon_server.exposition.text import Family, labels_of, page, sample
from tsemon_server.settings import MetricsSettings
from tsemon_server.store import Store

SILENCE_S = 3600.0
"""After how long a running run that was not heard of leaves /metrics: its process was killed. Not sooner, or an alert on
silence would be over before somebody has looked."""
BACKLOG_TIMES = 15
"""So many times as old as the runs may be what is counted in the database: that takes longer."""

_QUEUE = "tsemon_queue_depth"
_UNSETTLED = "tsemon_unsettled_frames"
_LAG = "tsemon_settling_lag_seconds"
_LEFT_OUT = "tsemon_exposition_left_out"

Families = dict[str, Family]


class _Cached:
    """What `make` makes, and for so many seconds makes not again."""

    def __init__(self, make: Callable[[], Families], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._families: Families = {}
        self._made_at = -math.inf

    def families(self) -> Families:
        if time.monotonic() - self._made_at >= self._seconds:
            self._families, self._made_at = self._make(), time.monotonic()
        return self._families


class Exposition:
    """The newest values of all live runs, and what the service counts of itself."""

    def __init__(
        self, store: Store, meters: Meters, settings: MetricsSettings, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._meters, self._settings = store, meters, settings
        self._clock = clock
        self._templates: Templates = {}
        self._lock = threading.Lock()
        # Who scrapes without pause does not keep the database busy.
        self._of_runs = _Cached(self._read_runs, settings.cache_s)
        self._of_backlog = _Cached(self._read_backlog, settings.cache_s * BACKLOG_TIMES)

    def text(self, content_type: str) -> bytes:
        """The page in one of its formats."""
        with self._lock:
            stored = self._of_runs.families() | self._of_backlog.families()
        families = self._meters.families()
        for name, family in stored.items():
            before = families.get(name)
            families[name] = family if before is None else before._replace(samples=before.samples + family.samples)
        families["tsemon_build"] = _build()
        return page((families[name] for name in sorted(families)), content_type)

    def _read_backlog(self) -> Families:
        with self._store.read() as reader:
            backlog = reader.live.backlog()
        queues = {'{queue="notices"}': backlog.notices, '{queue="deliveries"}': backlog.deliveries}
        found = [
            _gauge(_QUEUE, "What waits to be done", queues),
            _gauge(
                _UNSETTLED, "Frames that are not packed yet; the newest of each writer stay so", {"": backlog.frames}
            ),
        ]
        if backlog.settled_at is not None:
            lag_s = max(self._clock() - backlog.settled_at, 0.0)
            found.append(
                _gauge(_LAG, "Since all frames were packed that were to be, within half a minute", {"": lag_s})
            )
        return {family.name: family for family in found}

    def _read_runs(self) -> Families:
        now = self._clock()
        with self._store.read() as reader:
            live = reader.live.runs(
                running_since=now - SILENCE_S, ended_since=now - self._settings.grace_s, most=self._settings.max_runs
            )
            alerts, incidents = reader.alerts.firing(), reader.incidents.open()
        families, left_out = shown(live.runs, alerts, incidents, self._settings, self._templates)
        left_out.runs += live.num_left_out
        counts = {labels_of({"what": what}): count for what, count in vars(left_out).items()}
        families[_LEFT_OUT] = _gauge(_LEFT_OUT, "What the limits keep off this page", counts)
        return families


def _gauge(name: str, about: str, values: Mapping[str, float]) -> Family:
    return Family(name, "gauge", about, "".join(sample(name, labels, value) for labels, value in values.items()))


def _build() -> Family:
    line = sample("tsemon_build_info", labels_of({"version": __version__}), 1)
    return Family("tsemon_build", "info", "The version of the service", line)
