"""What do the rules cost per frame, and how much less if several frames are read together?

The built-in rules read frames of 960 values: 1, 8 or 64 of one run together, and one of each of 64 runs. Then they read
single frames after a long history, once with the state in memory, and once with the state loaded before each frame and
stored after it.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

from values import LAYERS, METRICS, Size, blocks

from tsemon.catalogue import LAYERED
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.program import View
from tsemon_server.rules.rule import Rule

T = TypeVar("T")
MEASURED_FRAMES = 512
"""Frames in one figure."""
START_FRAMES = 100
"""Frames before those, so that all memories are full."""
SIZES = 1, 8, 64
NUM_RUNS = 64
TROUBLES = "contained_faults", "dropped_frames", "loss_nonfinite"
"""Scalars that count errors; 0 in a healthy run."""
EVERY = 5
"""Steps from one frame to the next."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, nargs="+", default=[100, 10_000, 100_000], help="frames before")
    parser.add_argument("--rules", type=Path, help="rules to measure instead of the built-in ones")
    options = parser.parse_args()
    rules = [rule for rule in _rules(options.rules) if rule.on == "frame"]
    print(f"{len(rules)} rules, frames of {len(METRICS)} x {LAYERS} values; Python {platform.python_version()}\n")
    _print_batches(Evaluator(rules), [*islice(frames(rules), START_FRAMES + MEASURED_FRAMES)])
    print(
        "| frames before | read, CPU us a frame | read and stored, CPU us a frame | stored, bytes |\n|---|---|---|---|"
    )
    evaluator = Evaluator(rules)
    state, views, read = evaluator.start(), frames(rules), 0
    for history in sorted(options.history):
        for view in islice(views, max(0, history - read)):
            evaluator.advance(state, view)
        kept = evaluator.dump(state)

        def read_only(view: View) -> None:
            evaluator.advance(state, view)

        def read_and_store(view: View) -> None:
            nonlocal kept
            again = evaluator.load(kept)
            evaluator.advance(again, view)
            kept = evaluator.dump(again)

        measured = list(islice(views, MEASURED_FRAMES))
        costs_us = [_cpu_us(work, measured) for work in (read_only, read_and_store)]
        assert kept == evaluator.dump(state), "what was stored each time and what was kept in memory differ"
        read = history + MEASURED_FRAMES
        print(f"| {history:,} | {costs_us[0]:.0f} | {costs_us[1]:.0f} | {len(kept):,} |", flush=True)


def _print_batches(evaluator: Evaluator, views: Sequence[View]) -> None:
    print("| frames read together | CPU us a frame, least of 5 |\n|---|---|")
    for size in SIZES:
        cost_us = min(_batched_us(evaluator, views, size) for _ in range(5))
        print(f"| {size} | {cost_us:.0f} |", flush=True)
    cost_us = min(_of_runs_us(evaluator, views) for _ in range(5))
    print(f"| {NUM_RUNS}, of as many runs | {cost_us:.0f} |\n", flush=True)


def _batched_us(evaluator: Evaluator, views: Sequence[View], size: int) -> float:
    state = evaluator.start()
    evaluator.read([(state, views[:START_FRAMES])])
    chunks = [views[first : first + size] for first in range(START_FRAMES, len(views), size)]
    return _cpu_us(lambda chunk: evaluator.read([(state, chunk)]), chunks) * len(chunks) / (len(views) - START_FRAMES)


def _of_runs_us(evaluator: Evaluator, views: Sequence[View]) -> float:
    states = [evaluator.start() for _ in range(NUM_RUNS)]
    evaluator.read([(state, views[:START_FRAMES]) for state in states])
    of_runs = [[(state, [view]) for state in states] for view in views[START_FRAMES::NUM_RUNS]]
    return _cpu_us(evaluator.read, of_runs) / NUM_RUNS


def frames(rules: Sequence[Rule]) -> Iterator[View]:
    """Frames of a long run, which hold what the rules ask for; other metrics make up the 960 values."""
    measures = {measure for rule in rules for measure in rule.all_measures}
    layers = sorted(name for kind, name in measures if kind == "layers" and name in LAYERED)
    scalars = sorted(name for kind, name in measures if kind == "scalar")
    names = [*layers, *(name for name in METRICS if name not in layers)][: len(METRICS)]
    steps = count(step=EVERY)
    while True:
        for _, values_TML in blocks(Size(10_000, len(METRICS))):
            for values_ML in values_TML:
                own = dict.fromkeys(scalars, float(values_ML[0, 0])) | dict.fromkeys(TROUBLES, 0.0)
                yield View(next(steps), own, dict(zip(names, values_ML, strict=True)))


def _rules(file: Path | None) -> Sequence[Rule]:
    return PACK if file is None else load(file.read_text(), str(file))


def _cpu_us(work: Callable[[T], object], each: Sequence[T]) -> float:
    started = time.process_time()
    for one in each:
        work(one)
    return (time.process_time() - started) / len(each) * 1e6


if __name__ == "__main__":
    main()
