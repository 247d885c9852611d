"""What does tsemon cost a training step?

Steps of one model in three conditions, drawn in random order so that a drifting machine hits all alike:
`none` without tsemon, `unsampled` attached but not sampling this step, `sampled` all default measures on this step.

    python benchmarks/step_overhead.py [--device cuda] [--rounds 60]

Prints medians, the ratio to `none` with a bootstrap interval, and the time of `monitor.step()` itself.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tempfile
import time
from typing import Any

import torch

import tsemon
from tsemon.models import CausalLanguageModel

SIZES = {"vocab": 2048, "context": 256, "depth": 6, "width": 256, "heads": 8, "ffn": 1024}
BATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = CausalLanguageModel(**SIZES).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(SIZES["vocab"], (BATCH, SIZES["context"] + 1), device=device)

    def train_step() -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    with tempfile.TemporaryDirectory() as folder:
        monitor = tsemon.attach(model, optimizer, run="overhead", every=10**9, spool_dir=folder)
        figures = measure(monitor, train_step, device, options.rounds)
        status = monitor.status
        monitor.close()

    parameters = sum(p.numel() for p in model.parameters())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    print(
        f"{where}, {options.threads} thread(s), torch {torch.__version__}, float32, {parameters / 1e6:.1f} M parameters"
    )
    print(f"{SIZES}, batch {BATCH}, {options.rounds} rounds; frames dropped {status.delivery.num_dropped}\n")
    print("| condition | step, median ms | ratio to none | 95 % interval | monitor.step(), median us |")
    print("|---|---|---|---|---|")
    for name, (steps, calls) in figures.items():
        ratios = [b / a for a, b in zip(figures["none"][0], steps, strict=True)]
        low, high = bootstrap(ratios)
        call = f"{statistics.median(calls) * 1e6:.1f}" if calls else "-"
        median = statistics.median(steps) * 1e3
        print(f"| {name} | {median:.1f} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} | {call} |")


def measure(
    monitor: tsemon.Monitor, train_step: Any, device: torch.device, rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Per condition the seconds of each round's step, and of the call of monitor.step() in it."""
    figures: dict[str, tuple[list[float], list[float]]] = {n: ([], []) for n in ("none", "unsampled", "sampled")}
    order = random.Random(0)
    for number in range(rounds + 3):
        for condition in order.sample(list(figures), k=3):
            if condition == "sampled":
                # The cadence would arm the hooks at the end of the step before; here the order is drawn.
                monitor._next_sample = monitor._step
                monitor._probe.arm()
            wait(device)
            start = time.perf_counter()
            loss = train_step()
            called = time.perf_counter()
            if condition != "none":
                monitor.step(loss=loss)
            returned = time.perf_counter()
            wait(device)
            done = time.perf_counter()
            monitor._next_sample = 10**12
            if number >= 3:  # the first rounds warm up allocators and kernels
                figures[condition][0].append(done - start)
                if condition != "none":
                    figures[condition][1].append(returned - called)
    return figures


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bootstrap(ratios: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-50]


if __name__ == "__main__":
    main()
