"""Measure the cost of the losses of single sequences in a sampled step, if tsemon computes them from the labels.

Steps of a GPT-2 of Hugging Face that gets labels: without a monitor, sampled without the metrics of sequences, and sampled
with them, in random order. Times are CPU time of the training thread. Ratios are medians over rounds.

    python benchmarks/sequence_cost.py [--rounds 16]
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Collection

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import logging as quiet

from tsemon.catalogue import CATALOGUE
from tsemon.probes import Probe, find_blocks
from tsemon.probes.sequences import SEQUENCE_METRICS

SIZES = ((1000, 128, 4, 8), (8192, 256, 4, 8), (50257, 768, 2, 1))
"""Classes, width, blocks, sequences."""
TOKENS = 128
WARM_UP = 3
WITH = {metric.name for metric in CATALOGUE if metric.tier == "every"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    quiet.set_verbosity_error()
    print(f"{platform.machine()} CPU, 1 thread, torch {torch.__version__}, float32, {TOKENS} tokens, {rounds} rounds\n")
    print("| classes | width | blocks | sequences | step, CPU ms | sampled without | with | with / without |")
    print("|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        plain, without, with_them = measured(*size, rounds)
        cells = [f"{1e3 * statistics.median(plain):.1f}", ratio(without, plain), ratio(with_them, plain)]
        print(f"| {' | '.join([*map(str, size), *cells, ratio(with_them, without)])} |", flush=True)


def ratio(these: list[float], those: list[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(these, those, strict=True)):.3f}"


def measured(classes: int, width: int, blocks: int, sequences: int, rounds: int) -> list[list[float]]:
    """Seconds of the steps of each kind."""
    sizes = {"n_embd": width, "n_layer": blocks, "n_head": 4, "n_positions": TOKENS}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=classes, bos_token_id=0, eos_token_id=0, **sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    probe = Probe(model, [optimizer], find_blocks(model), on_fault=fail)
    ids = torch.randint(0, classes, (sequences, TOKENS))

    def step(wanted: Collection[str]) -> float:
        start = time.thread_time()
        if wanted:
            probe.arm(wanted)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if wanted:
            probe.collect(given={"loss": loss.detach()})
            probe.disarm()
        return time.thread_time() - start

    kinds: tuple[Collection[str], ...] = ((), WITH - {*SEQUENCE_METRICS}, WITH)
    spent: list[list[float]] = [[], [], []]
    for _ in range(rounds + WARM_UP):
        for kind in random.sample(range(3), 3):
            spent[kind].append(step(kinds[kind]))
    return [times[WARM_UP:] for times in spent]


def fail(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    main()
