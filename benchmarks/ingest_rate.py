"""How many frames a second of processor stores, from HTTP to commit with the rules, by one process of the service.

Each frame holds 48 layers x 20 metrics. A number of runs send at once, each over a connection of its own, the next body
when the reply to the last has come. Counted is the processor time of the service and of the engine's own processes, not
that of the clients, which share the machine. Then what a batch costs that comes once more, after 1e3 and after 1e6
stored frames, and what the machine itself takes to keep a frame.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psycopg
from cost import Cost, cost, stopwatch
from databases import ENGINES, Engine, Service
from floors import Floor, floors
from values import LAYERS, METRICS

from tsemon.wire import Array, Frame, crc_of, frames_to_body
from tsemon_server.store import Store

WATCHED = ("token_diversity", "centred_token_similarity")
"""What the built-in rules read."""
MEASURED = (*WATCHED, *METRICS[: 20 - len(WATCHED)])
FRAME_BYTES = 4 * LAYERS * len(MEASURED)
BLOCKS = [f"h.{number}" for number in range(LAYERS)]
WRITER = "rank0"
RETRIED = 64
"""Frames of the batch that comes once more."""


@dataclass(frozen=True)
class Rate:
    """What one number of runs and of frames a body came to."""

    num_runs: int
    frames_a_body: int
    frames: int
    bodies: int
    wall_s: float
    service_s: float
    engine_s: float
    """Seconds of processor."""

    def __str__(self) -> str:
        cpu_s = self.service_s + self.engine_s
        each = " | ".join(f"{1e3 * part / self.bodies:.2f}" for part in (self.service_s, self.engine_s))
        # The system counts CPU time in hundredths of a second: of a short round it may have counted none.
        rate = self.frames / cpu_s if cpu_s else math.nan
        return f"| {self.num_runs} | {self.frames_a_body} | {rate:,.0f} | {each} | {self.frames / self.wall_s:,.0f} |"


class Sender:
    """A training run that sends as fast as it is answered."""

    def __init__(self, service: Service, run: str, frames_a_body: int) -> None:
        self.num_bodies = 0
        self._frames_a_body = frames_a_body
        self._path = f"/api/v1/runs/{register(service, run)}/frames"
        self._connection = http.client.HTTPConnection(urlsplit(service.url).netloc)
        self._values = values_as_json()

    def send_until(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            self.send()

    def send(self) -> None:
        first = self.num_bodies * self._frames_a_body
        frames = map(self._frame_as_json, range(first, first + self._frames_a_body))
        self._connection.request("POST", self._path, frames_to_body(WRITER, 1, frames))
        reply = json.loads(self._connection.getresponse().read())
        assert reply["accepted"] == self._frames_a_body, reply
        self.num_bodies += 1

    def close(self) -> None:
        self._connection.close()

    def _frame_as_json(self, seq: int) -> str:
        return f'{{"seq":{seq},"step":{seq},{self._values},"crc":{crc_at(seq)}}}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each number of runs sends")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 10, 50], help="runs that send at once")
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 16, 64], help="frames a body")
    parser.add_argument(
        "--stored", type=int, nargs="*", default=[10**3, 10**6], help="frames before a batch comes again"
    )
    parser.add_argument("--floor-frames", type=int, default=1000)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{LAYERS} layers x {len(MEASURED)} metrics, {len(values_as_json())} bytes of JSON a frame\n")
    with tempfile.TemporaryDirectory(prefix="tsemon-ingest-") as folder:
        found = floors(Path(folder), FRAME_BYTES, arguments.floor_frames)
        for name in arguments.engines:
            with closing(ENGINES[name](Path(folder))) as engine:
                print_rates(engine, arguments.runs, arguments.frames, arguments.seconds)
                print_retries(engine, arguments.stored, arguments.seconds)
                found += postgresql_floors(engine, arguments.floor_frames)
    print_floors(found)


def print_rates(engine: Engine, runs: Sequence[int], frames: Sequence[int], seconds: float) -> None:
    print(f"{engine.name} {engine.version}\n")
    print("| runs at once | frames a body | frames a CPU second | service, CPU ms a body | engine | frames a second |")
    print("|---|---|---|---|---|---|")
    for num_runs in runs:
        for frames_a_body in frames:
            with closing(Service(engine, "rates")) as service:
                print(measure(service, engine, num_runs, frames_a_body, seconds), flush=True)
            engine.drop("rates")
    print()


def measure(service: Service, engine: Engine, num_runs: int, frames_a_body: int, seconds: float) -> Rate:
    senders = [Sender(service, f"run {number}", frames_a_body) for number in range(num_runs)]
    for sender in senders:
        sender.send()  # what is done once is not counted
    all_s, engine_s, start = service.cpu_s(), engine.cpu_s(), time.perf_counter()
    threads = [threading.Thread(target=sender.send_until, args=(start + seconds,)) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s, all_s, engine_s = time.perf_counter() - start, service.cpu_s() - all_s, engine.cpu_s() - engine_s
    for sender in senders:
        sender.close()
    num_bodies = sum(sender.num_bodies for sender in senders) - num_runs
    return Rate(num_runs, frames_a_body, num_bodies * frames_a_body, num_bodies, wall_s, all_s - engine_s, engine_s)


def print_retries(engine: Engine, stored: Sequence[int], seconds: float) -> None:
    """The frames of these hold a loss alone: what is looked up is their number."""
    if not stored:
        return
    print(f"| frames stored | the first {RETRIED} once more, CPU ms (wall) | the last {RETRIED} once more |")
    print("|---|---|---|")
    for num_frames in stored:
        with closing(Service(engine, "retries")) as service:
            run_id = register(service, "long")
            fill(engine.url("retries"), run_id, num_frames)
            first, last = (retry(service, run_id, seq, seconds / 3) for seq in (0, num_frames - RETRIED))
            print(f"| {num_frames:,} | {first} | {last} |", flush=True)
        engine.drop("retries")
    print()


def retry(service: Service, run_id: str, first: int, round_s: float) -> Cost:
    """What it costs to send frames from `first` on once more."""
    path = f"/runs/{run_id}/frames"
    body = frames_to_body(WRITER, 1, (loss_frame(seq).to_json() for seq in range(first, first + RETRIED)))
    assert service.post(path, body)["duplicates"] == RETRIED
    return cost(lambda: service.post(path, body), service.cpu_s, round_s)


def fill(url: str, run_id: str, num_frames: int) -> None:
    store = Store(url)
    for first in range(0, num_frames, 4096):
        seqs = range(first, min(first + 4096, num_frames))
        with store.write() as writer:
            writer.frames.add(run_id, 1, WRITER, [loss_frame(seq) for seq in seqs])
        store.settle()
    store.close()


def postgresql_floors(engine: Engine, num_frames: int) -> list[Floor]:
    """The same in PostgreSQL, with its processes; none for other engines."""
    url = engine.url("floor")
    if not url.startswith("postgresql"):
        return []
    blob = os.urandom(FRAME_BYTES)
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("CREATE TABLE frame (seq integer PRIMARY KEY, blob bytea NOT NULL)")
        spent = stopwatch(engine.cpu_s)
        for seq in range(num_frames):
            connection.execute("INSERT INTO frame VALUES (%s, %s)", (seq, blob))
        took = spent()
    return [Floor("PostgreSQL, one blob INSERT per commit", num_frames, FRAME_BYTES, took, 0)]


def print_floors(found: Sequence[Floor]) -> None:
    print("| floor of the machine | frames a CPU second | CPU ms a frame | frames a second |")
    print("|---|---|---|---|")
    for floor in found:
        cpu_s = floor.spent.cpu_s / floor.num_frames
        rate = floor.num_frames / floor.spent.wall_s
        print(f"| {floor.name} | {1 / cpu_s:,.0f} | {1e3 * cpu_s:.3f} | {rate:,.0f} |")


def register(service: Service, run: str) -> str:
    run_id: str = service.post("/runs", run=run, blocks=BLOCKS)["run_id"]
    return run_id


def loss_frame(seq: int) -> Frame:
    return Frame(seq, seq, 1e9 + seq, {"loss": 1.0})


@cache
def any_frame() -> Frame:
    """Activations have one entry more than there are blocks."""
    draw = np.random.default_rng(0)
    layers = {name: Array.of(draw.uniform(0.1, 1, LAYERS + (name in WATCHED)).tolist()) for name in MEASURED}
    return Frame(0, 0, 1e9, {"loss": 2.5}, layers)


@cache
def crc_at(seq: int) -> int:
    """Worked out once for all runs, so that these senders take as little of the machine as trainings do."""
    return crc_of(replace(any_frame(), seq=seq, step=seq))


def values_as_json() -> str:
    """Such a frame without its seq, step and CRC."""
    return any_frame().to_json().partition('"step":0,')[2].partition(',"crc":')[0]


if __name__ == "__main__":
    main()
