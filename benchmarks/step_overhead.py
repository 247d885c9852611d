"""What does tsemon cost a training step, and what do other ways to look into a model cost?

Steps of one model, in conditions that take turns in random order, so that a drifting machine hits all alike:
without a monitor, with tsemon on a step that it does not sample and on one that it samples, with naive hooks, with
wandb.watch (where wandb is installed), and with an equivalent of cockpit's economy configuration.
Then "amortised": tsemon left to its own cadence, from one sample to the next, each step beside one without it.

    python benchmarks/step_overhead.py
    python benchmarks/step_overhead.py --device cuda --size resformer-468m --dtype bfloat16 --compile

Prints medians, ratios to a step without a monitor with bootstrap intervals, and the time of `monitor.step()` itself.
Ratios of wall time are what a run feels; those of this process's CPU time are what is left of them on a busy machine,
where other people's work interrupts a step. (Neither wandb's other process nor a GPU is in the CPU time.)
On a GPU it also shows whether a step with tsemon ever waits for the device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from cockpit_economy import CockpitEconomy
from conditions import (
    Condition,
    NaiveHooks,
    Sampled,
    SampledOnDemand,
    SampledSlow,
    Unavailable,
    Unsampled,
    WandbWatch,
    unhooked,
)
from figures import Row, Spent, picture
from workload import SIZES, Workload

import tsemon

CONDITIONS = (Condition, Unsampled, Sampled, SampledSlow, SampledOnDemand, NaiveHooks, WandbWatch, CockpitEconomy)
WARM_UP = 3
"""Rounds, and samples of the cadence, that are not counted: allocators, kernels, running averages."""


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    work = Workload(options.size, options.batch, options.device, options.dtype, options.compile)
    print(f"{work}, {options.rounds} rounds\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        conditions, missing = available(work, folder)
        take_turns(work, conditions, options.rounds)
        for condition in conditions:
            condition.close()
        rows = [Row.of(c.name, c.spent, conditions[0].spent) for c in conditions]
        amortised, gaps, slow_every = at_own_cadence(work, folder, options.cycles) if options.cycles else (None, [], 1)
        rows[4:4] = [] if amortised is None else [amortised]
        print_steps(rows, missing)
        if gaps:
            unsampled, sampled, slow = (row.cpu.median for row in rows[1:4])
            by_gap = 1 + (sampled + (slow - sampled) / slow_every - unsampled) / statistics.mean(gaps)
            print(
                f"\namortised: a sample every {min(gaps)} to {max(gaps)} steps, one in {slow_every} with the slow tier; "
                f"by CPU time of the rows: {by_gap:.3f}"
            )
        print()
        print_calls(*conditions[1:3])
        if work.device.type == "cuda":
            print(f"\n{synchronises(work, folder)}")
    if options.svg:
        title = "One training step, relative to the same step without a monitor"
        caption = f"{work.size}: {work.parameters}; {work.where}"
        options.svg.write_text(picture(rows[1:], title, caption))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 is autocast")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument(
        "--cycles", type=int, default=16, help="from one sample to the next, for 'amortised'; 0 leaves it out"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--svg", type=Path, help="write the picture of the ratios to this file")
    return parser.parse_args()


def available(work: Workload, folder: Path) -> tuple[list[Condition], list[tuple[str, str]]]:
    """The conditions that can be measured here, and the others with the reason."""
    conditions, missing = [], []
    for kind in CONDITIONS:
        try:
            conditions.append(kind(work, folder))
        except Unavailable as reason:
            missing.append((kind.name, str(reason)))
    return conditions, missing


def take_turns(work: Workload, conditions: Sequence[Condition], rounds: int) -> None:
    order = random.Random(0)
    for number in range(WARM_UP + rounds):
        for condition in order.sample(conditions, k=len(conditions)):
            condition.hook()
            with clock(work) as spent:
                condition.step()
            condition.unhook()
            condition.spent.append(spent)
            if number == WARM_UP - 1:
                condition.forget()


def at_own_cadence(work: Workload, folder: Path, cycles: int) -> tuple[Row, list[int], int]:
    """Whole cycles at the default cadence, each step paired with one without; the gaps; one sample in how many is slow."""
    order = random.Random(0)
    gaps: list[int] = []
    cycles_of: dict[bool, list[Spent]] = {True: [], False: []}
    with tsemon.attach(work.model, work.optimizer, run="amortised", spool_dir=folder) as monitor:
        for _ in range(WARM_UP + cycles):
            gaps.append(monitor._next_sample - monitor._last_sample)
            steps: dict[bool, list[Spent]] = {True: [], False: []}
            for _ in range(gaps[-1]):
                for attached in order.sample((True, False), k=2):
                    steps[attached].append((attached_step if attached else detached_step)(work, monitor))
            for attached, spent in steps.items():
                cycles_of[attached].append(Spent.mean(spent))
        slow_every = monitor._cadence.slow_every
    row = Row.of("amortised", cycles_of[True][WARM_UP:], cycles_of[False][WARM_UP:])
    return row, gaps[WARM_UP:], slow_every


def attached_step(work: Workload, monitor: tsemon.Monitor) -> Spent:
    with clock(work) as spent:
        monitor.step(loss=work.step())
    return spent


def detached_step(work: Workload, monitor: tsemon.Monitor) -> Spent:
    """A step of which the monitor knows nothing: its hooks are out, its clock stands still."""
    start = time.perf_counter()
    monitor._probe.disarm()
    witness = unhooked(monitor)
    with clock(work) as spent:
        work.step()
    if witness is not None:
        witness._handles.append(work.optimizer.register_step_pre_hook(witness))
    if monitor._step == monitor._next_sample:
        monitor._arm(monitor._probe)
    monitor._last_sample_at += time.perf_counter() - start
    return spent


@contextmanager
def clock(work: Workload) -> Iterator[Spent]:
    """What the block has spent when it is done, and the device too."""
    spent = Spent()
    work.wait()
    wall, cpu = time.perf_counter(), time.process_time()
    yield spent
    work.wait()
    spent.wall_s, spent.cpu_s = time.perf_counter() - wall, time.process_time() - cpu


def print_steps(rows: Sequence[Row], missing: Sequence[tuple[str, str]]) -> None:
    print("| condition | step, median ms | ratio to none | 95 % interval | in CPU time | 95 % interval |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(row)
    for name, reason in missing:
        print(f"| {name} | {reason} | | | | |")


def print_calls(unsampled: Unsampled, sampled: Sampled) -> None:
    print("| `monitor.step()` | median us |\n|---|---|")
    for what, seconds in (
        ("step not sampled", unsampled.calls_s),
        ("step sampled", sampled.calls_s),
        ("of that, the measures", sampled.collects_s),
        ("of that, beyond the measures", sampled.beyond_s),
    ):
        print(f"| {what} | {statistics.median(seconds) * 1e6:.0f} |")
    status = sampled.monitor.status
    print(f"\nmeasured: {', '.join(status.measured)}")
    for reason in dict.fromkeys(status.not_measured.values()):
        print(f"not measured: {', '.join(n for n, why in status.not_measured.items() if why == reason)}: {reason}")
    for fault in status.faults:
        print(f"fault: {fault}")


def synchronises(work: Workload, folder: Path) -> str:
    """Whether any of a few steps, sampled and not, makes the host wait for the device. It must not."""
    with tsemon.attach(work.model, work.optimizer, run="synchronises", every=3, spool_dir=folder) as monitor:
        for _ in range(4):
            monitor.step(loss=work.step())
        work.wait()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(9):
                monitor.step(loss=work.step())
        except RuntimeError as error:
            return f"the training step itself synchronises: {error}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # In tsemon the error is contained, and counted as a fault.
        num_faults, faults = monitor.status.num_faults, monitor.status.faults
    return (
        f"tsemon synchronises: {faults[-1]}" if num_faults else "9 steps, 3 of them sampled: none waits for the device"
    )


if __name__ == "__main__":
    main()
