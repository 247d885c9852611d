"""What does it take to weigh attention, in memory and time, as sequences grow?

One layer's causal attention, one sequence: PyTorch's own forward pass, the rows that tsemon samples by default, the largest
logit of all rows, all rows in chunks as with `attention_rows="all"`, and the full matrix that all of them do without. Then
a whole training step that measures attention, without and with the largest logit.

    python benchmarks/attention_memory.py [--lengths 2048 4096 ...] [--threads 1] [--rounds 5] [--sizes small ...]

Memory is the peak of the process over what it held before (Linux), each figure in a process of its own. Time is that of
the thread: the median over rounds, in each of which attention's own forward pass takes its turn, and the median ratio to it.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from workload import SIZES, Workload

from tsemon.measures.rows import MAX_ROWS, Rows, choose, highest, weigh
from tsemon.measures.scores import DotProducts
from tsemon.probes import Probe, find_blocks
from tsemon.probes.attention import AttentionProbe

HEADS, WIDTH = 8, 64
LONGEST_FULL = 8192
"""The full matrix of twice as many tokens is 8 GiB, and its softmax another 8. All rows take minutes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["small"], help="models of the training steps")
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    print(f"{platform.machine()} CPU, {options.threads} thread(s), torch {torch.__version__}, float32, 1 sequence,")
    print(
        f"{HEADS} heads of width {WIDTH}, causal. Peak MiB over the inputs, seconds of the thread, times attention's own.\n"
    )
    print(f"| tokens | inputs | {' | '.join(KINDS)} |\n|{'---|' * (len(KINDS) + 2)}")
    for tokens in options.lengths:
        inputs_mib = 3 * HEADS * tokens * WIDTH * 4 / 2**20
        cells = [cell(kind, tokens, options.threads, options.rounds) for kind in KINDS]
        print(f"| {tokens:,} | {inputs_mib:.0f} MiB | {' | '.join(cells)} |", flush=True)
    torch.set_num_threads(options.threads)
    print(
        "\n| step | without a monitor | attention but its largest logit | with the largest logit |\n|---|---|---|---|"
    )
    for size in options.sizes:
        print(of_steps(Workload(size, options.batch, "cpu", "float32", False), options.rounds), flush=True)


def cell(kind: str, tokens: int, threads: int, rounds: int) -> str:
    if kind in ("full matrix", "all rows") and tokens > LONGEST_FULL:
        return "-"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak_mib, seconds, ratio = pool.apply(measure, (kind, tokens, threads, rounds))
    return f"{peak_mib:.0f} MiB, {seconds:.2f} s, {ratio:.2f}x"


def measure(kind: str, tokens: int, threads: int, rounds: int) -> tuple[float, float, float]:
    """Peak memory over that of before, in MiB, seconds, and how many times those of attention itself."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, tokens, WIDTH, generator=generator)
    KINDS[kind](query[:, :, :64], key[:, :, :64], value[:, :, :64])  # warms up libraries, which take memory, too
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_mib("VmRSS")
    KINDS[kind](query, key, value)
    peak_mib = resident_mib("VmHWM") - before
    both = [[seconds_of(KINDS[of], query, key, value) for of in (kind, "attention itself")] for _ in range(rounds)]
    seconds, ratios = [own for own, _ in both], [own / attending for own, attending in both]
    return peak_mib, statistics.median(seconds), statistics.median(ratios)


def seconds_of(function: Callable[..., object], *args: object) -> float:
    start = time.thread_time()
    function(*args)
    return time.thread_time() - start


def of_steps(workload: Workload, rounds: int) -> str:
    """A row of the table of training steps, which take turns; the first round warms up."""
    probe = Probe(workload.model, [workload.optimizer], find_blocks(workload.model), fail)
    attention = frozenset(AttentionProbe.METRICS)
    kinds = [frozenset[str](), attention - {"max_attention_logit"}, attention]
    found = [[seconds_of(step, workload, probe, wanted) for wanted in kinds] for _ in range(rounds + 1)][1:]
    cells = []
    for kind in range(len(kinds)):
        seconds = statistics.median(of_round[kind] for of_round in found)
        cells.append(f"{seconds:.2f} s, {statistics.median(of_round[kind] / of_round[0] for of_round in found):.3f}x")
    return f"| {workload.size}, {workload.parameters} | {' | '.join(cells)} |"


def step(workload: Workload, probe: Probe, wanted: frozenset[str]) -> None:
    if wanted:
        probe.arm(wanted)
    workload.step()
    if wanted:
        probe.collect()
        probe.disarm()


def fail(error: Exception) -> None:
    raise error


def resident_mib(which: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def weigh_rows(query: torch.Tensor, key: torch.Tensor, at_most: Rows) -> None:
    scores = DotProducts(query, key, is_causal=True)
    chosen = choose(scores.size, at_most, scores.device)
    weigh(scores, chosen)


def largest_logit(query: torch.Tensor, key: torch.Tensor) -> None:
    highest(DotProducts(query, key, is_causal=True), 1, torch.ones(1, query.shape[2], dtype=torch.bool))


def full_matrix(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    scores = (query @ key.mT).div_(math.sqrt(WIDTH))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill_(future, -torch.inf).softmax(dim=-1)
    torch.special.entr(weights).sum(dim=-1)


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]] = {
    "attention itself": attend,
    "sampled rows": lambda query, key, value: weigh_rows(query, key, MAX_ROWS),
    "largest logit": lambda query, key, value: largest_logit(query, key),
    "all rows": lambda query, key, value: weigh_rows(query, key, "all"),
    "full matrix": full_matrix,
}


if __name__ == "__main__":
    main()
