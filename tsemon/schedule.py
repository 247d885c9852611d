"""Which steps are sampled."""

from __future__ import annotations

import math
from typing import NamedTuple

from tsemon.errors import InvalidArgument

MAX_GAP = 1000
"""Steps between two samples at the most, however dear a sample is: rules need something to look at."""
FIRST_GAP = 10
"""Steps between the first samples, until the cost of one is known."""
NUM_WARM_UP = 2
"""Samples before the first whose news counts: what a sample cost is known at the next, and the first of all pays for
every warm-up."""
SLOW_EVERY = 10
"""One sample in so many takes the measures of the slow tier, too; the first is one of them."""
SMOOTHING = 0.3
"""Weight of the newest sample in the running averages that steer the cadence."""


class Spent(NamedTuple):
    """What a sample cost, and what there was to spend it on."""

    cost_s: float
    step_s: float
    """Wall time of a step without tsemon's, mean over the steps since the sample before."""
    is_slow: bool
    """Whether it took the measures of the slow tier, too."""


class Cadence:
    """Every N steps, or as often as a budget allows.

    With a budget, the gap to the next sample is what keeps cost / (gap x step time) at the budget, from running averages
    of both. When a run becomes faster, one sample comes too early and the next is within the budget again; when it
    becomes slower, samples are scarce for a few gaps.
    """

    def __init__(self, every: int | None = None, budget: float = 0.01, num_warm_up: int = NUM_WARM_UP) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise InvalidArgument(f"every is a number of optimizer steps, expected an int of at least 1, got {every!r}")
        if not isinstance(budget, int | float) or not 0 < budget <= 1:
            raise InvalidArgument(
                f"budget is tsemon's share of wall time, expected more than 0 and at most 1, got {budget!r}"
            )
        self._every = every
        self._budget = budget
        self._cost_s: dict[bool, float | None] = {False: None, True: None}  # by whether the sample is a slow one
        self._first_slow_s = 0.0
        """What the first sample cost, warm-ups and all: an upper bound, until another of the slow tier is known."""
        self._step_s: float | None = None
        self._num_samples = 0
        self._num_warm_up = num_warm_up
        self.gap = every or FIRST_GAP
        """Steps between two samples, but for bursts."""
        self._burst_gap = 1
        self._num_of_burst = 0
        """Samples of a burst that are still to come."""

    @property
    def is_slow(self) -> bool:
        """Whether the next sample takes the measures of the slow tier, too."""
        return self._num_of_burst > 0 or self._num_samples % SLOW_EVERY == 0

    def burst(self, *, steps: int, every: int) -> None:
        """Sample every `every` steps, all that is measured, for about `steps` steps from the next sample on."""
        self._num_of_burst, self._burst_gap = math.ceil(steps / every), every

    def next_gap(self, spent: Spent) -> int:
        """Steps from this sample to the next, told what the newest sample cost of which that is known."""
        self._num_samples += 1
        if spent.is_slow and self._num_samples <= self._num_warm_up:
            self._first_slow_s = spent.cost_s
        if self._every is None and self._num_samples > self._num_warm_up:
            self._cost_s[spent.is_slow] = _blend(self._cost_s[spent.is_slow], spent.cost_s)
            # Faster steps are believed at once, because the budget is a limit; slower ones, among them a pause, by and by.
            self._step_s = min(_blend(self._step_s, spent.step_s), spent.step_s)
            usual, slow = self._cost_s[False] or spent.cost_s, self._cost_s[True] or self._first_slow_s
            mean_cost_s = usual + max(slow - usual, 0.0) / SLOW_EVERY
            wanted = mean_cost_s / (self._budget * self._step_s) if self._step_s else MAX_GAP
            self.gap = min(max(math.ceil(wanted), 1), MAX_GAP)
        self._num_of_burst = max(self._num_of_burst - 1, 0)
        return self._burst_gap if self._num_of_burst else self.gap


def _blend(average: float | None, value: float) -> float:
    return value if average is None else (1 - SMOOTHING) * average + SMOOTHING * value
