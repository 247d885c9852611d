"""Does the adaptive cadence keep tsemon's cost within its budget when the steps suddenly take another time?

A small model whose batch becomes smaller, so that a step is about five times as fast, and then as large as before again.
The cost is what tsemon itself counts on the training thread; the share is that cost over wall time, in one window of
steps after the other. Before and after a change the cadence has settled; "just after" begins with the change.

First, what a short run pays: the share in the first steps of several new runs of fast steps, in which a sample is dear.

    python benchmarks/cadence.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from workload import Workload

import tsemon

SHAPES = {"slow": (32, 64), "fast": (4, 64)}
"""Batch and tokens of a step. An eighth of the tokens takes a fifth of the time: the optimizer works as long as before."""
WINDOW_S = 10.0
STRETCHES = (20, 100, 400, 2000)
"""Where the stretches of a new run end, in steps."""


@dataclass(frozen=True)
class Window:
    """A stretch of steps."""

    when: str
    step_s: float
    share: float
    gaps: tuple[int, ...]

    def __str__(self) -> str:
        gaps = f"{self.gaps[0]} to {self.gaps[-1]}, {len(self.gaps)} samples" if self.gaps else "no sample"
        return f"| {self.when} | {self.step_s * 1e3:.1f} | {self.share:.2%} | {gaps} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.01)
    parser.add_argument("--window", type=float, default=WINDOW_S, help="seconds of a window")
    parser.add_argument("--starts", type=int, default=5, help="how many new runs")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = Workload("tiny", SHAPES["slow"][0], "cpu", "float32", compiled=False)
    print(f"{work}, then {SHAPES['fast'][0]}; budget {options.budget:.1%}\n")
    print_starts(work, options.budget, options.starts)
    print("\n| window | step, mean ms | tsemon's share of wall time | gaps chosen |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        monitor = tsemon.attach(work.model, work.optimizer, run="cadence", budget=options.budget, spool_dir=folder)
        for window in story(work, monitor, options.window):
            print(window, flush=True)
        monitor.close()


def print_starts(work: Workload, budget: float, num_runs: int) -> None:
    work.use(*SHAPES["fast"])
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            shares_of_stretches(
                work, tsemon.attach(work.model, work.optimizer, run=f"start-{run}", budget=budget, spool_dir=folder)
            )
            for run in range(num_runs)
        ]
    print("| steps | share of these steps, median | share of all steps so far |\n|---|---|---|")
    for begin, end, *shares in zip((0, *STRETCHES), STRETCHES, *runs, strict=False):
        own, so_far = (statistics.median(share[which] for share in shares) for which in (0, 1))
        print(f"| {begin} to {end} | {own:.1%} | {so_far:.1%} |")


def shares_of_stretches(work: Workload, monitor: tsemon.Monitor) -> list[tuple[float, float]]:
    """tsemon's share of each stretch, and of all steps up to its end."""
    begin = start = time.perf_counter()
    cost_s, shares = 0.0, []
    for end in STRETCHES:
        while monitor._step < end:
            monitor.step(loss=work.step())
        now = time.perf_counter()
        shares.append(((monitor._cost_s - cost_s) / (now - start), monitor._cost_s / (now - begin)))
        start, cost_s = now, monitor._cost_s
    monitor.close()
    return shares


def story(work: Workload, monitor: tsemon.Monitor, window_s: float) -> Iterator[Window]:
    work.use(*SHAPES["slow"])
    watch("settling", work, monitor, window_s)
    yield watch("before", work, monitor, window_s)
    for shape, change in (("fast", "five times faster"), ("slow", "five times slower")):
        work.use(*SHAPES[shape])
        yield watch(f"just after: {change}", work, monitor, window_s)
        yield watch("after", work, monitor, window_s)


def watch(when: str, work: Workload, monitor: tsemon.Monitor, window_s: float) -> Window:
    """Whole gaps, each with the sample that ends it, for at least `window_s` seconds."""
    start, cost_s, first_step, gaps = time.perf_counter(), monitor._cost_s, monitor._step, []
    while (elapsed_s := time.perf_counter() - start) < window_s:
        last = monitor._last_sample
        while monitor._last_sample == last:
            monitor.step(loss=work.step())
        gaps.append(monitor.status.gap)
    return Window(when, elapsed_s / (monitor._step - first_step), (monitor._cost_s - cost_s) / elapsed_s, tuple(gaps))


if __name__ == "__main__":
    main()
