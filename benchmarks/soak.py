"""Does anything grow while many runs train for long?

Simulated runs send frames at a fixed rate through real outboxes, in a few trainer processes, to a service in a process of
its own. The resident memory of each process is read every few seconds (Linux).

    python benchmarks/soak.py [--minutes 10] [--runs 20] [--rate 5] [--trainers 4] [--database URL]

`--database` names an empty database; without it a new SQLite file is used, and deleted at the end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tsemon.errors import ServerUnreachable
from tsemon.transport import HttpDelivery, Outbox, Spool
from tsemon.wire import Array, Frame
from tsemon_client import Client

METRICS, LAYERS = 20, 12
SAMPLE_S = 5.0
"""Between two looks at the memory; ten times in a run that is shorter than that."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rate", type=float, default=5, help="frames a second of each run")
    parser.add_argument("--trainers", type=int, default=4, help="processes that share the runs")
    parser.add_argument("--database", help="URL of an empty database (default: a new SQLite file)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tsemon-soak-") as folder:
        database = options.database or f"sqlite:///{folder}/tsemon.db"
        print(
            f"{options.runs} runs at {options.rate:g} frames a second for {options.minutes:g} minutes, "
            f"{METRICS} metrics of {LAYERS} layers a frame,\n{options.trainers} trainer processes, "
            f"{database.partition(':')[0]}, {platform.machine()} with {os.cpu_count()} cores\n"
        )
        soak(options, database, Path(folder))


def soak(options: argparse.Namespace, database: str, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tsemon", "serve", "--port", str(port), "--database", database]
    service = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        await_service(url)
        trainers = [start_trainer(options, number, url, folder) for number in range(options.trainers)]
        pids = {"service": service.pid} | {f"trainer {i}": process.pid for i, (process, _) in enumerate(trainers, 1)}
        seconds = 60 * options.minutes
        samples = watch(pids, seconds, min(SAMPLE_S, seconds / 10))
        counts = [connection.recv() for _, connection in trainers]
        for process, _ in trainers:
            process.join()
        made, confirmed = map(sum, zip(*counts, strict=True))
        with Client(url) as client:
            stored = sum(run.num_frames for run in client.runs(project="soak"))
    finally:
        service.terminate()
        service.wait()
    print_memory(samples, seconds)
    print(f"\n{made} frames made, {confirmed} confirmed, {stored} stored")


def await_service(url: str) -> None:
    deadline = time.monotonic() + 60
    with Client(url, retries=0) as client:
        while True:
            try:
                next(client.runs(), None)
                return
            except ServerUnreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def start_trainer(
    options: argparse.Namespace, number: int, url: str, folder: Path
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """The process, and where it tells how many frames it has made and how many were confirmed."""
    runs = range(number, options.runs, options.trainers)
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    arguments = (url, folder, list(runs), options.rate, 60 * options.minutes, there)
    process = multiprocessing.get_context("spawn").Process(target=train, args=arguments, daemon=True)
    process.start()
    return process, here


def train(url: str, folder: Path, runs: Sequence[int], rate: float, seconds: float, connection: Connection) -> None:
    draw = random.Random(runs[0])
    outboxes = [open_outbox(url, folder, run) for run in runs]
    num_steps = int(seconds * rate)
    start = time.monotonic()
    for step in range(num_steps):
        for outbox in outboxes:
            values = {f"metric_{number}": Array.of(draw.random() for _ in range(LAYERS)) for number in range(METRICS)}
            outbox.put(lambda seq, step=step, values=values: Frame(seq, step, time.time(), {"loss": 1.0}, values))
        time.sleep(max(0.0, start + (step + 1) / rate - time.monotonic()))
    for outbox in outboxes:
        outbox.close(timeout_s=60)
    connection.send((num_steps * len(runs), sum(outbox.stats().num_sent for outbox in outboxes)))


def open_outbox(url: str, folder: Path, run: int) -> Outbox:
    registration = {
        "project": "soak",
        "run": f"run-{run}",
        "config": {},
        "tags": [],
        "blocks": [f"h.{layer}" for layer in range(LAYERS)],
        "resume_step": None,
        "attempt_key": "only",
    }
    return Outbox(Spool.create(folder / "spool", registration, "rank0"), HttpDelivery(url), on_warning=print)


def watch(pids: dict[str, int], seconds: float, every_s: float) -> dict[str, list[tuple[float, float]]]:
    """Seconds since the start and MiB, per process."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        for name, pid in pids.items():
            samples[name].append((now, resident_mib(pid)))
        time.sleep(min(every_s, max(0.0, seconds - now)))
    return samples


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def print_memory(samples: dict[str, list[tuple[float, float]]], seconds: float) -> None:
    print("| process | MiB at 20 % | 40 % | 60 % | 80 % | at the end | slope of the last half, MiB an hour |")
    print(f"|{'---|' * 7}")
    for name, measured in samples.items():
        mib = [next(mib for at, mib in measured if at >= share * seconds) for share in (0.2, 0.4, 0.6, 0.8)]
        cells = " | ".join(f"{value:.1f}" for value in [*mib, measured[-1][1]])
        late = [(at, mib) for at, mib in measured if at >= seconds / 2]
        print(f"| {name} | {cells} | {slope(late) * 3600:+.1f} |")


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line with the least squares."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return above / sum((x - mean_x) ** 2 for x, _ in points)


if __name__ == "__main__":
    main()
