"""What do the rules cost per frame, and does that grow with what came before?

The rules that come with tsemon read frames of 960 values, once as a replay does, which keeps what they remember in memory,
and once as the service does, which reads it before each body of frames and writes it down afterwards.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path

from values import LAYERS, METRICS, Size, blocks

from tsemon.catalogue import LAYERED
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.program import View
from tsemon_server.rules.rule import Rule

MEASURED_FRAMES = 500
"""Frames in one figure."""
TROUBLES = "contained_faults", "dropped_frames", "loss_nonfinite"
"""Scalars that count what goes wrong: nothing, in a healthy run."""
EVERY = 5
"""Steps from one frame to the next."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, nargs="+", default=[100, 10_000, 100_000], help="frames before")
    parser.add_argument("--rules", type=Path, help="rules to measure instead of the built-in ones")
    options = parser.parse_args()
    rules = [rule for rule in _rules(options.rules) if rule.on == "frame"]
    print(f"{len(rules)} rules, frames of {len(METRICS)} x {LAYERS} values; Python {platform.python_version()}\n")
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


def _cpu_us(work: Callable[[View], None], views: Sequence[View]) -> float:
    started = time.process_time()
    for view in views:
        work(view)
    return (time.process_time() - started) / len(views) * 1e6


if __name__ == "__main__":
    main()
