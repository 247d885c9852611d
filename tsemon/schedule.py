"""Which steps are sampled."""

from __future__ import annotations

import math
from typing import NamedTuple

from tsemon.errors import InvalidArgument

MAX_GAP = 1000
"""Maximum number of steps between two samples, however long a sample takes: rules need data."""
FIRST_GAP = 10
"""Steps between the first samples, until the cost of one is known."""
NUM_WARM_UP = 2
"""Samples before the cadence trusts a measured cost. The cost of a sample is known at the next one, and the first sample is
slow because everything warms up."""
WARM_UP_STEPS = 90
"""Maximum number of steps from the first sample to the last one of the warm-up. Later samples keep to the budget."""
REPAID = 0.5
"""Gaps are longer by up to this fraction until the excess over the budget is saved again."""
SLOW_EVERY = 10
"""At least one sample in ten takes the measures of the slow tier, too; the first is one of them."""
SLOW_WEIGHT = 10
"""A step less between two samples is worth as much as this many steps less between two samples of the slow tier."""
SMOOTHING = 0.3
"""Weight of the newest sample in the running averages that steer the cadence."""


class Spent(NamedTuple):
    """Cost of a sample, and the time until the next one."""

    cost_s: float
    step_s: float
    """Wall time of a step without tsemon's, mean over the steps since the sample before."""
    is_slow: bool
    """Whether it took the measures of the slow tier, too."""
    num_steps: int
    """Steps since the sample before."""


class Cadence:
    """Every N steps, or as often as a budget allows.

    With a budget, the gap to the next sample is what keeps cost / (gap x step time) at the budget, from running averages
    of both. When a run becomes faster, one sample comes too early and the next is within the budget again; when it
    becomes slower, samples are rare for a few gaps. If the warm-up or a burst exceeds the budget, later gaps are up to 50%
    longer until the run as a whole is within the budget. The slow tier has its own gap: the less it costs, the shorter.
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
        """Cost of the first sample with its warm-up: an upper bound until another sample of the slow tier is known."""
        self.slow_every = SLOW_EVERY
        """Outside of bursts, one sample in `slow_every` takes the measures of the slow tier, too."""
        self._num_since_slow = SLOW_EVERY
        """Samples since the last one of the slow tier, and 1."""
        self._step_s: float | None = None
        self._owed_s = 0.0
        """Seconds spent beyond the budget so far."""
        self._num_steps = 0
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
        return self._num_of_burst > 0 or self._num_since_slow >= self.slow_every

    def burst(self, *, steps: int, every: int) -> None:
        """Sample every `every` steps, all that is measured, for about `steps` steps from the next sample on."""
        self._num_of_burst, self._burst_gap = math.ceil(steps / every), every

    def next_gap(self, spent: Spent) -> int:
        """Return the number of steps to the next sample. `spent`: the newest known cost."""
        self._num_since_slow = 1 if self.is_slow else self._num_since_slow + 1
        self._num_samples += 1
        self._num_steps += spent.num_steps
        self._owed_s += spent.cost_s - self._budget * spent.step_s * spent.num_steps
        if self._num_samples <= self._num_warm_up:
            if spent.is_slow:
                self._first_slow_s = spent.cost_s
            if self._every is None and self._num_samples == self._num_warm_up:
                # The cost of the first sample is too high, but the next sample should not come much later than necessary.
                latest = max(WARM_UP_STEPS - self._num_steps, FIRST_GAP)
                self.gap = min(max(self._gap_for(spent.cost_s, spent.step_s), FIRST_GAP), latest)
        elif self._every is None:
            self._cost_s[spent.is_slow] = _blend(self._cost_s[spent.is_slow], spent.cost_s)
            # Faster steps are believed at once, because the budget is a limit; slower ones, among them a pause, by and by.
            self._step_s = min(_blend(self._step_s, spent.step_s), spent.step_s)
            usual_s = self._cost_s[False] or spent.cost_s
            # The first sample also paid for the warm-up, so it only bounds what the next one of the slow tier will cost.
            slow_s = self._cost_s[True] or min(self._first_slow_s, 2 * usual_s)
            more_s = max(slow_s - usual_s, 0.0)
            if self._cost_s[False] is not None:
                self.slow_every = _slow_every(usual_s, more_s)
            mean_cost_s = usual_s + more_s / self.slow_every
            self._owed_s = max(self._owed_s, -more_s)  # the others save for the next slow sample, but not more
            repaid_s = min(max(self._owed_s, 0.0), REPAID * mean_cost_s)
            self.gap = self._gap_for(mean_cost_s + repaid_s, self._step_s)
        self._num_of_burst = max(self._num_of_burst - 1, 0)
        return self._burst_gap if self._num_of_burst else self.gap

    def _gap_for(self, cost_s: float, step_s: float) -> int:
        wanted = cost_s / (self._budget * step_s) if step_s else MAX_GAP
        return min(max(math.ceil(wanted), 1), MAX_GAP)


def _slow_every(usual_s: float, more_s: float) -> int:
    """Return in which one of how many samples the slow tier is taken, if it costs `more_s` beside `usual_s`.

    With r for this number, the gap is proportional to usual_s + more_s / r. This r minimizes gap + r gap / SLOW_WEIGHT.
    At least every second sample goes without the slow tier, or the cost of such a sample would not be measured any more.
    """
    best = math.sqrt(SLOW_WEIGHT * more_s / usual_s) if usual_s else SLOW_EVERY
    return min(max(round(best), 2), SLOW_EVERY)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else (1 - SMOOTHING) * average + SMOOTHING * value
