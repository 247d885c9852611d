"""Which steps are sampled."""

from __future__ import annotations

import math

from tsemon.errors import InvalidArgument

MAX_GAP = 1000
"""Steps between two samples at the most, however dear a sample is: rules need something to look at."""
FIRST_GAP = 10
"""Steps from the first sample, which pays for every warm-up and says nothing about cost, to the second."""
SMOOTHING = 0.3
"""Weight of the newest sample in the running averages that steer the cadence."""


class Cadence:
    """Every N steps, or as often as a budget allows.

    With a budget, the gap to the next sample is what keeps cost / (gap x step time) at the budget, from running averages
    of both. When a run becomes faster, one sample comes too early and the next is within the budget again; when it
    becomes slower, samples are scarce for a few gaps.
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
        self._cost_s: float | None = None
        self._step_s: float | None = None
        self._num_samples = 0
        self.gap = every or FIRST_GAP

    def after_sample(self, cost_s: float, elapsed_s: float, num_steps: int) -> int:
        """Steps from this sample to the next.

        `cost_s`: what this sample cost; `elapsed_s`: wall time of the last `num_steps` steps, this one included.
        """
        self._num_samples += 1
        if self._every is None and self._num_samples > 1:
            self._cost_s = _blend(self._cost_s, cost_s)
            # Faster steps are believed at once, because the budget is a limit; slower ones, among them a pause, by and by.
            step_s = max(elapsed_s - cost_s, 0.0) / num_steps
            self._step_s = min(_blend(self._step_s, step_s), step_s)
            wanted = self._cost_s / (self._budget * self._step_s) if self._step_s else MAX_GAP
            self.gap = min(max(math.ceil(wanted), 1), MAX_GAP)
        return self.gap


def _blend(average: float | None, value: float) -> float:
    return value if average is None else (1 - SMOOTHING) * average + SMOOTHING * value
