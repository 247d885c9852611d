"""/metrics: the newest frame of each live run, read from the database at each scrape.

Not from memory, so that any number of processes give the same answer; and without timestamps, because a sample that
carries one outlives its run by five minutes in Prometheus.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Literal

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from tsemon_server.store import Store

GRACE_S = 60.0
"""How long an ended run stays in /metrics after its last update: two scrapes, so that its end is seen."""
SILENCE_S = 3600.0
"""After how long a running run that was not heard of leaves /metrics: its process was killed."""


class Exposition:
    """The service's own counters, and what the database says of the runs."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._registry = CollectorRegistry()
        self._frames = Counter(
            "tsemon_frames", "Frames that came, new or stored before", ["outcome"], registry=self._registry
        )
        for outcome in ("accepted", "duplicate"):
            self._frames.labels(outcome)
        self._refused = Counter("tsemon_refused_bodies", "Bodies of frames that were refused", registry=self._registry)
        self._rule_errors = Counter("tsemon_rule_errors", "Frames that the rules failed on", registry=self._registry)
        self._registry.register(self)

    def count(self, outcome: Literal["accepted", "duplicate", "refused"], number: int) -> None:
        (self._refused if outcome == "refused" else self._frames.labels(outcome)).inc(number)

    def count_rule_error(self) -> None:
        self._rule_errors.inc()

    def describe(self) -> list[Metric]:
        """Nothing: or the registry would read the database when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What the database says now; the registry asks at each scrape."""
        info = InfoMetricFamily("tsemon_run", "Names of a run, to join on run_id", labels=["run_id"])
        # One family each, the unit in the name where there is one.
        step = GaugeMetricFamily("tsemon_run_step", "Step of the newest frame", labels=["run_id"])
        loss = GaugeMetricFamily("tsemon_run_loss", "Training loss in the newest frame", labels=["run_id"])
        seen = GaugeMetricFamily(
            "tsemon_run_last_seen_timestamp_seconds", "When the run was last heard of", labels=["run_id"]
        )
        similarity = GaugeMetricFamily(
            "tsemon_layer_token_similarity",
            "Energy that tokens share per layer in the newest frame; layer 00 is the first block's input",
            labels=["run_id", "layer"],
        )
        firing = GaugeMetricFamily(
            "tsemon_alert_firing", "1 per alert that fires", labels=["run_id", "rule", "severity"]
        )
        now = self._clock()
        with self._store.read() as reader:
            runs = reader.live_runs(running_since=now - SILENCE_S, ended_since=now - GRACE_S)
            alerts = reader.firing_alerts()
        for run in runs:
            info.add_metric([run.run_id], {"project": run.project, "run": run.run})
            seen.add_metric([run.run_id], run.seen_at)
            if run.step is not None:
                step.add_metric([run.run_id], run.step)
            if run.loss is not None:
                loss.add_metric([run.run_id], run.loss)
            digits = max(2, int(math.log10(max(len(run.token_similarity), 1))) + 1)
            for layer, value in enumerate(run.token_similarity):
                similarity.add_metric([run.run_id, f"{layer:0{digits}}"], value)
        live = {run.run_id for run in runs}
        for alert in alerts:
            if alert.run_id in live:
                firing.add_metric(list(alert), 1)
        yield from (info, step, loss, seen, similarity, firing)

    def make_router(self) -> APIRouter:
        router = APIRouter()

        @router.get("/metrics", tags=["operation"], response_class=Response)
        def metrics() -> Response:
            """What Prometheus scrapes."""
            return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        return router
