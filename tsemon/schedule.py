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
    of both, so it follows a run that becomes faster or slower.
    """

    def __init__(self, every: int | None = None, budget: float = 0.01) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise InvalidArgument(f"every is a number of optimizer steps, expected an int of at least 1, got {every!r}")
        if not isinstance(budget, int | float) or not 0 < budget <= 1:
            raise InvalidArgument(
                f"budget is tsemon's share of wall time, expected more than 0 and at most 1, got {budget!r}"
            )
        self._every = every
        self._budget = budget
        self._cost_s: dict[bool, float | None] = {False: None, True: None}  # by whether the sample is a slow one
        self._step_s: float | None = None
        self._num_samples = 0
        self.gap = every or FIRST_GAP

    @property
    def is_slow(self) -> bool:
        """Whether the next sample takes the measures of the slow tier, too."""
        return self._num_samples % SLOW_EVERY == 0

    def next_gap(self, spent: Spent) -> int:
        """Steps from this sample to the next, told what the newest sample cost of which that is known."""
        self._num_samples += 1
        if self._every is None and self._num_samples > NUM_WARM_UP:
            self._cost_s[spent.is_slow] = _blend(self._cost_s[spent.is_slow], spent.cost_s)
            self._step_s = _blend(self._step_s, spent.step_s)
            usual, slow = self._cost_s[False] or spent.cost_s, self._cost_s[True] or 0.0
            mean_cost_s = usual + max(slow - usual, 0.0) / SLOW_EVERY
            wanted = mean_cost_s / (self._budget * self._step_s) if self._step_s else MAX_GAP
            self.gap = min(max(math.ceil(wanted), 1), MAX_GAP)
        return self.gap


def _blend(average: float | None, value: float) -> float:
    return value if average is None else (1 - SMOOTHING) * average + SMOOTHING * value
