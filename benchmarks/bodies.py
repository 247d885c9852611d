"""The cost of a frame on its way: bytes and microseconds in the spool, and the server's CPU for JSON and for packed bodies.

`attach` records the frames of a small model of 48 blocks, with the metrics of its slow tier in every tenth.
Both kinds of body take turns, in random order, on one server with all rules; each kind has a run of its own.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from databases import Service, SQLite

import tsemon
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig
from tsemon.stacks import Stacks
from tsemon.transport import Spool, SpoolReader, find_spools
from tsemon.transport.packing import pack_frames
from tsemon.transport.spool import make_record
from tsemon.wire import PACKED, Array, Frame, frames_to_body
from tsemon_server.services.ingest.packed import read_packed
from tsemon_server.services.ingest.schemas import read_frames

BLOCKS = 48
WRITER = "rank0"
KINDS: dict[str, Callable[[str, int, Sequence[str]], bytes]] = {"application/json": frames_to_body, PACKED: pack_frames}
READERS: dict[str, Callable[[bytes], Any]] = {"application/json": read_frames, PACKED: read_packed}


class Sender:
    """Sends the recorded frames again and again to one run, each time as new ones."""

    def __init__(self, service: Service, kind: str, frames_a_body: int, recorded: Sequence[Frame]) -> None:
        blocks = [f"h.{number}" for number in range(BLOCKS)]
        run_id = service.post("/runs", run=f"{kind} {frames_a_body}", blocks=blocks)["run_id"]
        self._path, self._kind, self._frames_a_body = f"/api/v1/runs/{run_id}/frames", kind, frames_a_body
        self._service, self._recorded, self._next = service, recorded, 0

    def cpu_us(self, num_frames: int) -> float:
        """Microseconds of the server's CPU a frame, the mean over this number of frames."""
        bodies = [self._body() for _ in range(num_frames // self._frames_a_body)]
        start_s = self._service.cpu_s()
        # Not kept: the server closes a connection on which the other kind lets it wait.
        with closing(http.client.HTTPConnection(urlsplit(self._service.url).netloc)) as connection:
            for body in bodies:
                connection.request("POST", self._path, body, {"Content-Type": self._kind})
                reply = json.loads(connection.getresponse().read())
                assert reply["accepted"] == self._frames_a_body, reply
        return 1e6 * (self._service.cpu_s() - start_s) / (len(bodies) * self._frames_a_body)

    def _body(self) -> bytes:
        texts = []
        for _ in range(self._frames_a_body):
            seq = self._next
            texts.append(replace(self._recorded[seq % len(self._recorded)], seq=seq, step=seq).to_json())
            self._next += 1
        return KINDS[self._kind](WRITER, 1, texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=130, help="frames to record")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--frames", type=int, default=1024, help="frames that each kind sends in a round")
    parser.add_argument("--bodies", type=int, nargs="+", default=[1, 64], help="frames a body")
    arguments = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {arguments.rounds} rounds\n"
    )
    with tempfile.TemporaryDirectory(prefix="tsemon-bodies-") as folder:
        texts = record(Path(folder), arguments.steps)
        print_spool(Path(folder), texts)
        print_reading(texts, arguments.bodies)
        print_server(Path(folder), texts, arguments)


def record(folder: Path, num_steps: int) -> list[str]:
    """The frames of a training, as JSON."""
    torch.manual_seed(0)
    config = CausalLanguageModelConfig(vocab=256, context=32, depth=BLOCKS, width=32, heads=4, ffn=64)
    model = CausalLanguageModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens_BT = torch.randint(config.vocab, (2, config.context + 1))
    with tsemon.attach(model, optimizer, run="recorded", every=1, spool_dir=folder) as monitor:
        for _ in range(num_steps):
            optimizer.zero_grad()
            logits_BTV = model(tokens_BT[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
    (found,) = find_spools(folder)
    return [text for texts in SpoolReader(found).new_frames() for text in texts]


def print_spool(folder: Path, texts: Sequence[str]) -> None:
    frames = [frame_of(text) for text in texts]
    registration = {"project": "default", "run": "appended", "attempt_key": "key"}
    with closing(Spool.create(folder, registration, WRITER)) as spool:
        append_us = median_us(spool.append, texts)
        size_bytes = sum(path.stat().st_size for path in spool.folder.glob("*.seg")) / len(texts)
    print("| one frame in the spool | |\n|---|---|")
    print(f"| bytes of JSON | {statistics.mean(map(len, texts)):,.0f} |")
    print(f"| bytes on disk | {size_bytes:,.0f} |")
    print(f"| making the JSON, us | {median_us(Frame.to_json, frames):.0f} |")
    print(f"| compressing it, us | {median_us(make_record, texts):.0f} |")
    print(f"| compressing it and writing it to the file, us | {append_us:.0f} |\n")


def print_reading(texts: Sequence[str], sizes: Sequence[int]) -> None:
    print("| frames a body | kind | bytes a frame | client, us a frame | server reads and checks it, us a frame |")
    print("|---|---|---|---|---|")
    for size in sizes:
        some = texts[1 : size + 1]
        for kind, make in KINDS.items():
            body = make(WRITER, 1, some)
            making, reading = (
                median_us(ask, [None] * 40) / len(some)
                for ask in (
                    lambda _, make=make, some=some: make(WRITER, 1, some),
                    lambda _, kind=kind, body=body: READERS[kind](body).to_frames(Stacks.of(BLOCKS)),
                )
            )
            print(f"| {len(some)} | {kind} | {len(body) / len(some):,.0f} | {making:.0f} | {reading:.0f} |")
    print()


def print_server(folder: Path, texts: Sequence[str], arguments: argparse.Namespace) -> None:
    recorded = [frame_of(text) for text in texts]
    print(
        "| frames a body | JSON, us of the server's CPU a frame | packed | packed / JSON, median of the rounds (range) |"
    )
    print("|---|---|---|---|")
    for size in arguments.bodies:
        with closing(Service(SQLite(folder), f"bodies{size}")) as service:
            senders = {kind: Sender(service, kind, size, recorded) for kind in KINDS}
            found: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for sender in senders.values():
                sender.cpu_us(size)  # what is done once is not counted
            for _ in range(arguments.rounds):
                for kind in random.sample(list(KINDS), k=len(KINDS)):
                    found[kind].append(senders[kind].cpu_us(arguments.frames))
        plain, packed = found.values()
        ratios = [one / other for one, other in zip(packed, plain, strict=True) if other]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
        print(f"| {size} | {statistics.median(plain):,.0f} | {statistics.median(packed):,.0f} | {ratio} |", flush=True)


def median_us(ask: Callable[[Any], Any], arguments: Sequence[Any]) -> float:
    """Microseconds of this thread's CPU, the median."""
    spent_s = []
    for argument in arguments:
        start_s = time.thread_time()
        ask(argument)
        spent_s.append(time.thread_time() - start_s)
    return 1e6 * statistics.median(spent_s)


def frame_of(text: str) -> Frame:
    sent = json.loads(text)
    layers, heads = (
        {name: Array(tuple(array["shape"]), base64.b64decode(array["f32"])) for name, array in sent[kind].items()}
        for kind in ("layers", "heads")
    )
    scalars = {name: math.nan if value is None else float(value) for name, value in sent["scalars"].items()}
    return Frame(sent["seq"], sent["step"], sent["time"], scalars, layers, heads, sent.get("not_measured"))


if __name__ == "__main__":
    main()
