"""Does the post-norm model of each pair of the demo fail, and does its de-escalated twin learn?

python benchmarks/demo_settings.py digits --seeds 0 1 2
"""

import argparse
import dataclasses
import platform
import time

import torch

from tsemon.lab.demo.twins import DIGITS, TEXT
from tsemon.lab.train.training import Training

SHOWN_STEPS = (0, 10, 20, 30, 50, 100, 200, 299)


def token_diversity(x_btd):
    centred = x_btd - x_btd.mean(dim=1, keepdim=True)
    return (centred.square().sum(dim=(1, 2)) / x_btd.square().sum(dim=(1, 2))).mean().item()


def measure(recipe):
    """Loss over the last 50 steps, diversity of the last block (before de-escalation) by step, CPU seconds."""
    training = Training(recipe)
    diversity = []
    training.model.blocks[-1].norm2.register_forward_hook(
        lambda _, __, output: diversity.append(token_diversity(output.detach()))
    )
    began = time.process_time()
    losses = [loss.item() for loss in training.losses]
    return sum(losses[-50:]) / 50, diversity, time.process_time() - began


def main():
    pairs = {twins.recipe.name: twins for twins in (DIGITS, TEXT)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", choices=pairs)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    twins = pairs[arguments.pair]
    recipe = twins.recipe
    print(f"{platform.machine()}, torch {torch.__version__}, float32, 1 thread, Python {platform.python_version()}")
    print(f"{recipe.preset}, lr {recipe.learning_rate}, batch {recipe.batch_size}, {recipe.steps} steps")
    print(
        "seed   tau  last-50 loss  CPU s  token diversity of the last block at step " + ", ".join(map(str, SHOWN_STEPS))
    )
    for seed in arguments.seeds:
        for tau in (None, twins.tau):
            loss, diversity, seconds = measure(dataclasses.replace(twins.with_tau(tau), seed=seed))
            shown = " ".join(f"{diversity[step]:.1e}" for step in SHOWN_STEPS)
            print(f"{seed:4} {tau!s:>5} {loss:13.3f} {seconds:6.1f}  {shown}", flush=True)


if __name__ == "__main__":
    main()
