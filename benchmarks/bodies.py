"""The cost of a frame on its way: bytes and microseconds in the spool, and the server's CPU for JSON and for packed bodies.

`attach` records the frames of a small model of 48 blocks, with the metrics of its slow tier in every tenth.
Both kinds of body take turns, in random order, on one server with all rules; each kind has a run of its own. Another
run gets packed bodies of several writers that send the same steps. After each turn this process decodes the JSON of the same
frames (`json.loads`, base64, arrays), and the server's cost is given in units of that.
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
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from databases import ENGINES, Engine, Service

import tsemon
from tsemon.models import CausalLanguageModel, CausalLanguageModelConfig
from tsemon.stacks import Stacks
from tsemon.transport import Spool, SpoolReader, find_spools
from tsemon.transport.packing import pack_frames
from tsemon.transport.spool import make_record
from tsemon.wire import PACKED, Array, Frame, frames_to_body
from tsemon_server.services.ingest.packed import read_packed
from tsemon_server.services.ingest.usual import read_json

BLOCKS = 48
WRITER = "rank0"
WRITERS = 8
"""In the run that has several."""
KINDS: dict[str, Callable[[str, int, Sequence[str]], bytes]] = {"application/json": frames_to_body, PACKED: pack_frames}
READERS: dict[str, Callable[[bytes], Any]] = {"application/json": read_json, PACKED: read_packed}


class Turn(NamedTuple):
    """Microseconds of CPU a frame, the mean over the frames that were sent."""

    decoding: float
    service: float
    engine: float

    @property
    def ratio(self) -> float:
        """CPU of the server and its database over the CPU of decoding the JSON."""
        return (self.service + self.engine) / self.decoding


class Sender:
    """Sends the recorded frames again and again to one run, each time as new ones."""

    def __init__(
        self, service: Service, kind: str, num_writers: int, frames_a_body: int, recorded: Sequence[Frame]
    ) -> None:
        blocks = [f"h.{number}" for number in range(BLOCKS)]
        run_id = service.post("/runs", run=f"{kind} {num_writers} {frames_a_body}", blocks=blocks)["run_id"]
        self._path, self._kind, self._frames_a_body = f"/api/v1/runs/{run_id}/frames", kind, frames_a_body
        self._writers = [f"rank{number}" for number in range(num_writers)]
        self._service, self._recorded, self._next = service, recorded, 0

    def turn(self, num_frames: int) -> Turn:
        """Send at least this number of frames, and decode their JSON."""
        batches = [self._batch() for _ in range(-(-num_frames // (self._frames_a_body * len(self._writers))))]
        sent = [(writer, texts) for texts in batches for writer in self._writers]
        bodies = [KINDS[self._kind](writer, 1, texts) for writer, texts in sent]
        num_frames = len(bodies) * self._frames_a_body
        plain = [frames_to_body(writer, 1, texts) for writer, texts in sent]
        service_s, engine_s = self._service.own_cpu_s(), self._service.engine_cpu_s()
        # Not kept: the server closes a connection on which the other kind lets it wait.
        with closing(http.client.HTTPConnection(urlsplit(self._service.url).netloc)) as connection:
            for body in bodies:
                connection.request("POST", self._path, body, {"Content-Type": self._kind})
                reply = json.loads(connection.getresponse().read())
                assert reply["accepted"] == self._frames_a_body, reply
        service_s, engine_s = self._service.own_cpu_s() - service_s, self._service.engine_cpu_s() - engine_s
        decoding_s = sum(cpu_s_of(decode, body) for body in plain)
        return Turn(*(1e6 * spent_s / num_frames for spent_s in (decoding_s, service_s, engine_s)))

    def _batch(self) -> list[str]:
        texts = []
        for _ in range(self._frames_a_body):
            seq = self._next
            texts.append(replace(self._recorded[seq % len(self._recorded)], seq=seq, step=seq).to_json())
            self._next += 1
        return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=130, help="frames to record")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--frames", type=int, default=1024, help="frames that each kind sends in a round")
    parser.add_argument("--bodies", type=int, nargs="+", default=[1, 64], help="frames a body")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    arguments = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {arguments.rounds} rounds\n"
    )
    with tempfile.TemporaryDirectory(prefix="tsemon-bodies-") as folder:
        texts = record(Path(folder), arguments.steps)
        print_spool(Path(folder), texts)
        print_reading(texts, arguments.bodies)
        recorded = [frame_of(text) for text in texts]
        for name in arguments.engines:
            with closing(ENGINES[name](Path(folder).resolve())) as engine:
                print_server(engine, recorded, arguments)


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


def print_server(engine: Engine, recorded: Sequence[Frame], arguments: argparse.Namespace) -> None:
    print(f"{engine.name} {engine.version}\n")
    print(
        "| frames a body | kind | decoding JSON, us a frame | service | database | server / decoding, median (range) |"
    )
    print("|---|---|---|---|---|---|")
    for size in arguments.bodies:
        with closing(Service(engine, f"bodies{size}")) as service:
            senders = {kind: Sender(service, kind, 1, size, recorded) for kind in KINDS}
            senders[f"{PACKED}, {WRITERS} writers"] = Sender(service, PACKED, WRITERS, size, recorded)
            found: dict[str, list[Turn]] = {kind: [] for kind in senders}
            for sender in senders.values():
                sender.turn(max(size, len(recorded)))  # what is done once is not counted
            for _ in range(arguments.rounds):
                for kind in random.sample(list(senders), k=len(senders)):
                    found[kind].append(senders[kind].turn(arguments.frames))
        for kind, turns in found.items():
            decoding, own, of_engine = (statistics.median(column) for column in zip(*turns, strict=True))
            ratios = [turn.ratio for turn in turns]
            print(
                f"| {size} | {kind} | {decoding:.0f} | {own:,.0f} | {of_engine:,.0f} | "
                f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}) |",
                flush=True,
            )
    print()


def decode(body: bytes) -> list[dict[str, np.ndarray]]:
    """The arrays of the frames of a JSON body: the work that no server can avoid."""
    return [
        {
            name: np.frombuffer(base64.b64decode(array["f32"]), "<f4").reshape(array["shape"])
            for kind in ("layers", "heads")
            for name, array in frame[kind].items()
        }
        for frame in json.loads(body)["frames"]
    ]


def cpu_s_of(ask: Callable[[Any], Any], argument: Any) -> float:
    """Seconds of this thread's CPU."""
    start_s = time.thread_time()
    ask(argument)
    return time.thread_time() - start_s


def median_us(ask: Callable[[Any], Any], arguments: Sequence[Any]) -> float:
    """Microseconds of this thread's CPU, the median."""
    return 1e6 * statistics.median(cpu_s_of(ask, argument) for argument in arguments)


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
