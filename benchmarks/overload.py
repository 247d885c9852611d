"""How long does a fleet wait that reconnects together after an outage, and how much memory does the server use and keep?

Each client is the outbox of a training process with frames that `attach` recorded, and sends as it would: packed bodies of
up to 256 frames, and again after a refusal when `Retry-After` says. All begin together.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from bodies import BLOCKS, frame_of, record
from databases import ENGINES, Engine, Service

from tsemon.errors import ServerUnreachable
from tsemon.transport import HttpDelivery, MemorySpool, Outbox

LOOK_EVERY_S = 0.05
MIB = 2**20


@dataclass
class Seen:
    """Events of all clients, in seconds since the first of them sent a body."""

    began: float = math.inf
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    asked_to_wait: list[float] = field(default_factory=list)
    timed_out: list[float] = field(default_factory=list)
    """Bodies that were not answered within the client's patience."""

    def now(self) -> float:
        return time.monotonic() - self.began


class SeenDelivery(HttpDelivery):
    """The delivery of one client, which notes how each body was answered."""

    def __init__(self, url: str, seen: Seen) -> None:
        super().__init__(url)
        self._seen = seen

    def send(self, run_id: str, body: bytes, content_type: str = "application/json") -> dict[str, Any]:
        self._seen.began = min(self._seen.began, time.monotonic())
        try:
            reply = super().send(run_id, body, content_type)
        except ServerUnreachable as error:
            if error.retry_after_s is None:
                self._seen.timed_out.append(self._seen.now())
            else:
                self._seen.refused.append(self._seen.now())
                self._seen.asked_to_wait.append(error.retry_after_s)
            raise
        self._seen.accepted.append(self._seen.now())
        return reply


class Memory:
    """The resident memory of a process, looked at again and again."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.peak = self.now = self.look()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def look(self) -> float:
        return float(self._process.memory_info().rss / MIB)

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            self.now = self.look()
            self.peak = max(self.peak, self.now)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--frames", type=int, default=256, help="of each client")
    parser.add_argument("--rest-s", type=float, default=60.0, help="seconds until the memory is looked at again")
    parser.add_argument("--steps", type=int, default=130, help="frames to record")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{arguments.clients} clients with {arguments.frames} frames each\n")
    print(
        "| engine | first response, s | first accepted | longest gap | all stored after | refused | timed out | "
        "asked to wait, s | memory before, MiB | at most | afterwards |"
    )
    print("|---" * 11 + "|")
    with tempfile.TemporaryDirectory(prefix="tsemon-overload-") as folder:
        texts = record(Path(folder), arguments.steps)
        texts = [replace(frame_of(texts[n % len(texts)]), seq=n, step=n).to_json() for n in range(arguments.frames)]
        for name in arguments.engines:
            with closing(ENGINES[name](Path(folder).resolve())) as engine:
                for number in range(arguments.rounds):
                    print(burst(engine, f"overload{number}", texts, arguments), flush=True)


def burst(engine: Engine, database: str, texts: Sequence[str], arguments: argparse.Namespace) -> str:
    """One row of the table."""
    with closing(Service(engine, database)) as service, closing(Memory(service.pid)) as memory:
        before = memory.now
        start, seen = threading.Barrier(arguments.clients), Seen()
        clients = [
            threading.Thread(target=client, args=(service.url, number, texts, start, seen))
            for number in range(arguments.clients)
        ]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        runs = service.get("/runs", limit=1000)["runs"]
        num_stored = sum(run["num_frames"] for run in runs)
        assert num_stored == arguments.clients * arguments.frames, f"{num_stored} frames were stored"
        time.sleep(arguments.rest_s)
        gap = max(later - earlier for earlier, later in pairwise([0.0, *sorted(seen.accepted)]))
        responses = [*seen.accepted, *seen.refused]
        waits = f"{min(seen.asked_to_wait):.0f} to {max(seen.asked_to_wait):.0f}" if seen.asked_to_wait else "-"
        return (
            f"| {engine.name} | {min(responses):.1f} | {min(seen.accepted):.1f} | {gap:.1f} | {max(seen.accepted):.1f} | "
            f"{len(seen.refused)} | {len(seen.timed_out)} | {waits} | {before:.0f} | {memory.peak:.0f} | {memory.now:.0f} |"
        )


def client(url: str, number: int, texts: Sequence[str], start: threading.Barrier, seen: Seen) -> None:
    blocks = [f"h.{block}" for block in range(BLOCKS)]
    registration = {
        "project": "default", "run": f"run {number}", "attempt_key": f"{number}", "blocks": blocks, "resume_step": 0,
    }  # fmt: skip
    spool = MemorySpool(registration, "rank0")
    for text in texts:
        spool.append(text)
    start.wait()
    Outbox(spool, SeenDelivery(url, seen), on_warning=lambda _text: None).close(timeout_s=600)


if __name__ == "__main__":
    main()
