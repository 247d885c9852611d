"""What does a scrape of /metrics cost, and what do the service's own counters cost a body of frames?

A scrape of so many live runs, from the database to the bytes of the page, against the encoder of prometheus_client for
the same samples: that one is given the values as they are on the page, so that reading and aggregates are not its work.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send
from values import LAYERS, METRICS, Size, blocks

from tsemon.wire import Array, Frame
from tsemon_server.exposition import Exposition, Meters, RequestMeter, share_counters
from tsemon_server.exposition.text import OPEN_METRICS, PLAIN
from tsemon_server.settings import MetricsSettings
from tsemon_server.store import Store

SCALARS = 11
"""With the names of the run, its step and its times 975 series and the aggregates."""
OLDER_FRAMES = 63
"""Of each run, so that the newest is to be found among others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 10, 50, 100], help="live runs")
    parser.add_argument("--rounds", type=int, default=9, help="scrapes of each kind, which take turns")
    parser.add_argument("--bodies", type=int, default=20_000, help="bodies that are counted")
    options = parser.parse_args()
    print(
        f"{len(METRICS)} metrics x {LAYERS} layers and {SCALARS} scalars a run on SQLite; Python "
        f"{platform.python_version()}, prometheus_client {version()}; medians of {options.rounds}, CPU ms\n"
    )
    print(
        "| live runs | layers of | series | kB | a scrape | OpenMetrics | prometheus_client | ratio | its OpenMetrics |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for num_runs in options.runs:
        with tempfile.TemporaryDirectory() as folder, closing(Store(f"sqlite:///{folder}/runs.db")) as store:
            fill(store, num_runs)
            for layers in (("*",), MetricsSettings.layers):
                print(row(store, num_runs, layers, options.rounds), flush=True)
    print("\n| own counters | CPU us a body of one frame |\n|---|---|")
    print(f"| one process | {counting_us(options.bodies):.1f} |")
    with tempfile.TemporaryDirectory() as folder:
        share_counters(Path(folder), 0)
        print(f"| shared among workers | {counting_us(options.bodies):.1f} |")


def version() -> str:
    from importlib.metadata import version as version_of

    return version_of(prometheus_client.__name__)


def fill(store: Store, num_runs: int) -> None:
    """Runs with frames."""
    names = list(METRICS)
    values = (values_ML for _, values_TML in blocks(Size(OLDER_FRAMES + 1, len(names))) for values_ML in values_TML)
    frames = [
        Frame(
            step, step, 0.0,
            {f"scalar_{number}": step / (number + 3) for number in range(SCALARS)},
            {name: Array.of(row.tolist()) for name, row in zip(names, values_ML, strict=True)},
        )
        for step, values_ML in enumerate(islice(values, OLDER_FRAMES + 1))
    ]  # fmt: skip
    for number in range(num_runs):
        with store.write() as writer:
            of_run = {"blocks": ["h"] * LAYERS, "config": None, "tags": None, "resume_step": None, "attempt_key": None}
            run_id = writer.runs.register("default", f"run {number}", **of_run).run_id
            writer.frames.add(run_id, 1, "w", frames)


def row(store: Store, num_runs: int, layers: Sequence[str], rounds: int) -> str:
    settings = MetricsSettings(layers=tuple(layers), max_series=10**7, cache_s=0.0)
    exposition = Exposition(store, Meters(), settings)
    text = exposition.text(PLAIN)  # what is done once is not counted
    samples = list(text_string_to_metric_families(text.decode()))
    num_series = sum(len(family.samples) for family in samples)
    registry = CollectorRegistry()
    registry.register(Stock(samples))
    ways: list[Callable[[], object]] = [
        lambda: exposition.text(PLAIN),
        lambda: exposition.text(OPEN_METRICS),
        lambda: generate_latest(registry),
        lambda: generate_open_metrics(registry),
    ]
    taken_ms: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for taken, way in zip(taken_ms, ways, strict=True):
            taken.append(1e3 * cpu_s(way))
    ours, ours_open, stock, stock_open = map(statistics.median, taken_ms)
    of = "all metrics" if layers == ("*",) else f"{len(layers)} metrics"
    size = f"{num_runs} | {of} | {num_series:,} | {len(text) / 1e3:,.0f}"
    return f"| {size} | {ours:.1f} | {ours_open:.1f} | {stock:.1f} | {stock / ours:.1f} | {stock_open:.1f} |"


class Stock:
    """The samples of a page, as a collector of one's own gives them to prometheus_client."""

    def __init__(self, families: Sequence[Metric]) -> None:
        gauges = [family for family in families if family.samples and family.type == "gauge"]
        self._families = [
            (family.name, list(family.samples[0].labels), [([*s.labels.values()], s.value) for s in family.samples])
            for family in gauges
        ]

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, labels, samples in self._families:
            family = GaugeMetricFamily(name, "The same", labels=labels)
            for values, value in samples:
                family.add_metric(values, value)
            yield family


def counting_us(num_bodies: int) -> float:
    """What is counted of one body of one frame, on its way from the request to the answer, and nothing else."""
    meters = Meters()

    async def app(_: Scope, __: Receive, send: Send) -> None:
        with meters.committing():
            meters.count_rules(0.001, 1)
        meters.count_body(1, 0, 0.002)
        await send({"type": "http.response.start", "status": 200})

    async def ignore(_: Message) -> None:
        pass

    async def receive() -> Message:
        return {"type": "http.request"}

    async def count() -> None:
        for _ in range(num_bodies):
            await metered({**scope}, receive, ignore)

    metered = RequestMeter(app, meters)
    route = SimpleNamespace(path_format="/runs/{run_id}/frames")
    path = {"path": "/api/v1/runs/0123456789abcdef/frames", "path_params": {"run_id": "0123456789abcdef"}}
    scope = {"type": "http", "method": "POST", "route": route, **path}
    return statistics.median(1e6 * cpu_s(lambda: asyncio.run(count())) / num_bodies for _ in range(5))


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()
