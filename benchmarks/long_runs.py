"""Long runs in databases on either engine.

All lies in one folder. What was filled there is not filled again, so one folder serves several scripts.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
from cost import stopwatch
from databases import ENGINES, Engine
from figures import Spent
from numpy.typing import NDArray
from values import LAYERS, METRICS, Size, blocks

from tsemon.wire import Array, Frame
from tsemon_server.store import Store

PROJECT = "benchmark"
WRITER = "rank0"
SETTLED_STEPS = 2048
"""After so many, housekeeping has its turn. In days of training it has it more often; filling takes seconds."""
NARROW = 4
"""Metrics of the longest runs: a million steps of 20 would take 8 GB on two engines."""
BLOCKS = [f"h.{number}" for number in range(LAYERS)]


def options(question: str | None) -> argparse.ArgumentParser:
    """What both scripts can be told."""
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6], help="of 4 metrics")
    parser.add_argument("--wide-steps", type=int, nargs="*", default=[10**4, 10**5], help="of all 20 metrics")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--peers", metavar="PYTHON", help="a Python that has mlflow, trackio, tensorboard or aim")
    parser.add_argument("--peer-steps", type=int, default=1000, help="of all 20 metrics, for the side-by-side")
    parser.add_argument("--folder", type=Path, help="keep all here, and use what is here already")
    parser.add_argument("--svg", type=Path, help="draw the growth from step to step")
    return parser


def sizes(arguments: argparse.Namespace) -> list[Size]:
    """The runs that were asked for."""
    narrow = [Size(steps, NARROW) for steps in arguments.steps]
    return narrow + [Size(steps, len(METRICS)) for steps in arguments.wide_steps]


@contextmanager
def engines(arguments: argparse.Namespace) -> Iterator[tuple[Path, list[Engine]]]:
    """The folder and the engines that were asked for; closed at the end of the block."""
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tsemon-")))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder, [stack.enter_context(closing(ENGINES[name](folder))) for name in arguments.engines]


def conditions(engines: Sequence[Engine]) -> str:
    """Where and on what."""
    versions = ", ".join(f"{engine.name} {engine.version}" for engine in engines)
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {psutil.cpu_count()} cores of {platform.machine()}, Python "
        f"{platform.python_version()}, {versions}. A run has {LAYERS} layers; a frame has 4 or 20 metrics of float32 per "
        "layer, and two scalars that are not counted. Sizes are steps x metrics."
    )


@dataclass(frozen=True)
class Filled:
    """A run in a database, and what it took to store it."""

    run_id: str
    spent: Spent
    size_bytes: int


def filled(engine: Engine, size: Size, folder: Path) -> Filled:
    """The run of this size on this engine, in a database of its own: stored and settled now, unless it is there."""
    note = folder / f"{engine.name}_{size.name}.json"
    if not note.exists():
        engine.drop(size.name)  # of a time that ended early
        spent = stopwatch(engine.cpu_s)
        run_id = _fill(engine, size)
        note.write_text(json.dumps(asdict(Filled(run_id, spent(), engine.size_bytes(size.name)))))
    found = json.loads(note.read_text())
    return Filled(found["run_id"], Spent(**found["spent"]), found["size_bytes"])


def _fill(engine: Engine, size: Size) -> str:
    with closing(Store(engine.url(size.name))) as store:
        with store.write() as writer:
            run_id = writer.runs.register(
                PROJECT, size.name, blocks=BLOCKS, config={}, tags=[], resume_step=None, attempt_key=None
            ).run_id
        for first, values_TML in blocks(size):
            with store.write() as writer:
                writer.frames.add(run_id, 1, WRITER, list(frames(first, values_TML)))
            if first % SETTLED_STEPS == 0 or first + len(values_TML) == size.steps:
                store.settle()
                engine.tidy(size.name)
        return run_id


def settle(url: str) -> None:
    """Do at once what the service's housekeeping does by and by."""
    with closing(Store(url)) as store:
        store.settle()


def frames_of(size: Size) -> Iterator[Frame]:
    """All frames of a run."""
    for first, values_TML in blocks(size):
        yield from frames(first, values_TML)


def frames(first: int, values_TML: NDArray[np.float32]) -> Iterator[Frame]:
    """A frame per step, as a monitor would make them; seq is the step."""
    for step, values_ML in enumerate(values_TML, start=first):
        layers = {name: Array((LAYERS,), row.tobytes()) for name, row in zip(METRICS, values_ML, strict=False)}
        scalars = {"loss": 2 + 1 / (1 + step / 1000), "learning_rate": 3e-4}
        yield Frame(step, step, 1.7e9 + step, scalars, layers)


def body(some: Sequence[Frame], attempt: int = 1) -> bytes:
    """Frames as a client sends them."""
    sent = ",".join(frame.to_json() for frame in some)
    return f'{{"writer":"{WRITER}","attempt":{attempt},"frames":[{sent}]}}'.encode()
