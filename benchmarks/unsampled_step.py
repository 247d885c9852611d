"""Is `monitor.step()` at an unsampled step slower than in an earlier version?

    git worktree add /tmp/before COMMIT
    python benchmarks/unsampled_step.py --before /tmp/before [--scalars N]

The two versions take turns, each time in a process of its own, so that a drifting machine hits both alike. All times are CPU
times of the training thread. The loss is a tensor, as in most loops; so are the scalars, which the version of now is given
besides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
NUM_STEPS, WARM_UP = 1000, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--scalars", type=int, default=0, help="scalars besides the loss")
    options = parser.parse_args()
    if options.before is None:
        print(*microseconds(options.scalars))
        return
    found: dict[str, list[tuple[float, float]]] = {"before": [], "now": []}
    for _ in range(options.pairs):
        found["before"].append(in_a_process(options.before.resolve(), 0))
        found["now"].append(in_a_process(HERE, options.scalars))
    print("| version | median step, us | mean step, us |\n|---|---|---|")
    for version, pairs in found.items():
        medians, means = zip(*pairs, strict=True)
        print(f"| {version} | {statistics.median(medians):.1f} | {statistics.median(means):.1f} |")
    ratios = [now[1] / before[1] for before, now in zip(found["before"], found["now"], strict=True)]
    print(f"\nmeans, now to before: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def in_a_process(checkout: Path, num_scalars: int) -> tuple[float, float]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--scalars", str(num_scalars)]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    median, mean = map(float, printed.stdout.split())
    return median, mean


def microseconds(num_scalars: int) -> tuple[float, float]:
    """The median and the mean step of the version that is imported here."""
    import torch
    from workload import Workload

    import tsemon

    torch.set_num_threads(1)
    work, spent = Workload("tiny", 4, "cpu", "float32", compiled=False), []
    with tempfile.TemporaryDirectory() as folder:
        # After its first samples, a budget this small leaves only unsampled steps.
        monitor = tsemon.attach(work.model, work.optimizer, run="unsampled", budget=1e-6, spool_dir=folder)
        for step in range(NUM_STEPS):
            loss = work.step()
            scalars = {f"own{number}": torch.tensor(float(step + number)) for number in range(num_scalars)}
            start = time.thread_time()
            monitor.step(loss=loss, **scalars)
            spent.append(time.thread_time() - start)
        monitor.close()
    unsampled = spent[WARM_UP:]
    return 1e6 * statistics.median(unsampled), 1e6 * statistics.fmean(unsampled)


if __name__ == "__main__":
    main()
