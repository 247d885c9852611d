"""What does it take to weigh attention, in memory and time, as sequences grow?

One layer's causal attention, one sequence: PyTorch's own forward pass, the rows that tsemon samples by default, all rows in
chunks as with `attention_rows="all"`, and the full matrix that both do without.

    python benchmarks/attention_memory.py [--lengths 2048 4096 ...] [--threads 1]

Memory is the peak of the process over what it held before (Linux), each figure in a process of its own; time is that of
the thread, once.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tsemon.measures.rows import MAX_ROWS, Rows, choose, weigh
from tsemon.measures.scores import DotProducts

HEADS, WIDTH = 8, 64
LONGEST_FULL = 8192
"""The full matrix of twice as many tokens is 8 GiB, and its softmax another 8."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(f"{platform.machine()} CPU, {options.threads} thread(s), torch {torch.__version__}, float32, 1 sequence,")
    print(f"{HEADS} heads of width {WIDTH}, causal. Peak MiB over the inputs' own, seconds of the thread.\n")
    print(f"| tokens | inputs | {' | '.join(KINDS)} |\n|{'---|' * (len(KINDS) + 2)}")
    for tokens in options.lengths:
        inputs_mib = 3 * HEADS * tokens * WIDTH * 4 / 2**20
        cells = [cell(kind, tokens, options.threads) for kind in KINDS]
        print(f"| {tokens:,} | {inputs_mib:.0f} MiB | {' | '.join(cells)} |", flush=True)


def cell(kind: str, tokens: int, threads: int) -> str:
    if kind == "full matrix" and tokens > LONGEST_FULL:
        return "-"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak_mib, seconds = pool.apply(measure, (kind, tokens, threads))
    return f"{peak_mib:.0f} MiB, {seconds:.2f} s"


def measure(kind: str, tokens: int, threads: int) -> tuple[float, float]:
    """Peak memory over that of before, in MiB, and seconds."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, tokens, WIDTH, generator=generator)
    KINDS[kind](query[:, :, :64], key[:, :, :64], value[:, :, :64])  # warms up libraries, which take memory, too
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = resident_mib("VmRSS"), time.thread_time()
    KINDS[kind](query, key, value)
    seconds = time.thread_time() - start
    return resident_mib("VmHWM") - before, seconds


def resident_mib(which: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def weigh_rows(query: torch.Tensor, key: torch.Tensor, at_most: Rows) -> None:
    scores = DotProducts(query, key, is_causal=True)
    chosen = choose(scores.size, at_most, scores.device)
    weigh(scores, chosen, torch.ones(1, query.shape[2], dtype=torch.bool), torch.zeros(1, dtype=torch.long))


def full_matrix(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    scores = (query @ key.mT).div_(math.sqrt(WIDTH))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill_(future, -torch.inf).softmax(dim=-1)
    torch.special.entr(weights).sum(dim=-1)


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]] = {
    "attention itself": attend,
    "sampled rows": lambda query, key, value: weigh_rows(query, key, MAX_ROWS),
    "all rows": lambda query, key, value: weigh_rows(query, key, "all"),
    "full matrix": full_matrix,
}


if __name__ == "__main__":
    main()
