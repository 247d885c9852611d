"""Learning rates over a run, each a formula in the step. All warm up linearly: step t, from 0, has (t + 1) / warmup.

Every schedule is a factor of the optimizer's learning rates and a function of the step alone, so that a resumed run has the
very rates of one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from tsemon.errors import InvalidArgument


def constant(optimizer: Optimizer, *, warmup: int = 0) -> LRScheduler:
    """The optimizer's own rates, after `warmup` steps."""
    return _scaled(optimizer, warmup, lambda step: 1.0)


def cosine(optimizer: Optimizer, *, warmup: int = 0, total: int, final_ratio: float = 0.1) -> LRScheduler:
    """Half a cosine from the end of the warm-up down to `final_ratio` of the rate at step `total`, and so ever after.

    r + (1 - r) (1 + cos(pi p)) / 2 with p = (t - warmup) / (total - warmup), r = final_ratio. A run of fewer steps than its
    warm-up ends in it.
    """
    if total < 1:
        raise InvalidArgument(f"a cosine is over at least 1 step, got a total of {total}")
    if not 0 <= final_ratio <= 1:
        raise InvalidArgument(f"final_ratio is a share of the rate, from 0 to 1, got {final_ratio}")

    def factor(step: int) -> float:
        progress = min(1.0, (step - warmup) / max(total - warmup, 1))
        return final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * progress)) / 2

    return _scaled(optimizer, warmup, factor)


def inverse_sqrt(optimizer: Optimizer, *, warmup: int = 0) -> LRScheduler:
    """sqrt(warmup / (t + 1)) after the warm-up, which it continues; without one 1 / sqrt(t + 1)."""
    return _scaled(optimizer, warmup, lambda step: math.sqrt(max(warmup, 1) / (step + 1)))


def multi_step(
    optimizer: Optimizer, *, total: int, at: Sequence[float] = (0.7, 0.9), factor: float = 0.2, warmup: int = 0
) -> LRScheduler:
    """Times `factor` at each of the shares `at` of `total` steps (Classic Transformers, Section 3.3)."""
    if total < 1 or not all(0 < share <= 1 for share in at):
        raise InvalidArgument(f"expected shares above 0 and up to 1 of at least 1 step, got {tuple(at)} of {total}")
    if factor <= 0:
        raise InvalidArgument(f"factor is what the rate is multiplied by, above 0, got {factor}")
    milestones = [round(share * total) for share in at]
    return _scaled(optimizer, warmup, lambda step: factor ** sum(step >= milestone for milestone in milestones))


def _scaled(optimizer: Optimizer, warmup: int, factor: Callable[[int], float]) -> LRScheduler:
    if warmup < 0:
        raise InvalidArgument(f"warmup is a number of steps, 0 or more, got {warmup}")
    return LambdaLR(optimizer, lambda step: (step + 1) / warmup if step < warmup else factor(step))
