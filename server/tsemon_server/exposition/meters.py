"""What the service counts of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tsemon_server.exposition.sharing import counted
from tsemon_server.exposition.text import Family, FamilyKind, labels_of, sample

INGEST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RULES_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)
REQUEST_S = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
"""Few, for there is a histogram for each route."""


class Meters:
    """Counters and histograms of this process, or of all workers where they share them."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        frames = Counter("tsemon_frames", "Frames that came, new or stored before", ["outcome"], registry=own)
        self._accepted, self._duplicate = (frames.labels(outcome) for outcome in ("accepted", "duplicate"))
        self._refused = Counter("tsemon_refused_bodies", "Bodies of frames that were refused", registry=own)
        self._rule_errors = Counter("tsemon_rule_errors", "Frames that the rules failed on", registry=own)
        self._ingest = Histogram(
            "tsemon_ingest_seconds", "From a body of frames to its commit", buckets=INGEST_S, registry=own
        )
        self._rules = Histogram(
            "tsemon_rule_evaluation_seconds", "What the rules take for a frame", buckets=RULES_S, registry=own
        )
        queue = Gauge(
            "tsemon_queue_depth", "What waits to be done", ["queue"], registry=own, multiprocess_mode="livesum"
        )
        self._commits = queue.labels("commits")
        self._notifications = Counter(
            "tsemon_notifications",
            "Messages that were sent, tries that failed, and alerts that a receiver will not be told of",
            ["receiver", "outcome"],
            registry=own,
        )
        self._requests = Counter(
            "tsemon_http_requests", "Requests that were answered", ["method", "route", "status"], registry=own
        )
        self._request_seconds = Histogram(
            "tsemon_http_request_seconds",
            "From a request to the end of its answer",
            ["route"],
            buckets=REQUEST_S,
            registry=own,
        )
        self._known_requests: dict[tuple[str, str, str], Counter] = {}
        self._known_routes: dict[str, Histogram] = {}

    def count_body(self, accepted: int, duplicates: int, seconds: float) -> None:
        """A body of frames was stored, so long after it had come."""
        self._accepted.inc(accepted)
        self._duplicate.inc(duplicates)
        self._ingest.observe(seconds)

    def count_refused(self) -> None:
        """A body of frames was not stored."""
        self._refused.inc()

    @contextmanager
    def committing(self) -> Iterator[None]:
        """While a body waits for its commit."""
        self._commits.inc()
        try:
            yield
        finally:
            self._commits.dec()

    def count_rules(self, seconds: float, num_frames: int) -> None:
        """The rules have read this many frames in so much time."""
        for _ in range(num_frames):
            self._rules.observe(seconds / num_frames)

    def count_rule_error(self) -> None:
        """The rules failed on a frame."""
        self._rule_errors.inc()

    def count_notifications(self, receiver: str, outcome: str, number: int) -> None:
        """So much has come of messages to a receiver."""
        self._notifications.labels(receiver, outcome).inc(number)

    def count_request(self, method: str, route: str, status: str, seconds: float) -> None:
        """A request was answered. All but the time come from small sets, whatever strangers ask for."""
        key = method, route, status
        request = self._known_requests.get(key)
        if request is None:
            request = self._known_requests[key] = self._requests.labels(*key)
            self._known_routes[route] = self._request_seconds.labels(route)
        request.inc()
        self._known_routes[route].observe(seconds)

    def families(self) -> dict[str, Family]:
        """By name, as they are now."""
        found: dict[str, Family] = {}
        for metric in sorted(counted(self._registry), key=lambda metric: metric.name):
            # When a counter was made says nothing here, and doubles the number of series.
            samples = [entry for entry in metric.samples if not entry.name.endswith("_created")]
            lines = "".join(sample(entry.name, labels_of(entry.labels), float(entry.value)) for entry in samples)
            found[metric.name] = Family(metric.name, cast(FamilyKind, metric.type), metric.documentation, lines)
        return found
