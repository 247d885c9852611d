"""Which steps are sampled."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from tsemon.errors import InvalidArgument

MAX_GAP = 2000
"""Maximum number of steps between two samples, however long a sample takes: rules need data."""
FIRST_GAP = 10
"""Steps between the first samples, until the cost of one is known."""
WARM_UP_STEPS = 90
"""Maximum number of steps from the first sample to the last one of the warm-up. Later samples keep to the budget."""
AIM = 0.8
"""Fraction of the budget that the gaps aim at. The rest is for the warm-up, zooms, and the samples just before the end."""
REPAID = 1.0
"""Gaps are longer by up to this fraction until all that was spent beyond it is saved, and the cost of the next sample."""
WARM_UP_REPAID = 0.1
"""The same for the extra cost of the first sample."""
SLOW_EVERY = 10
"""At least one sample in ten takes the measures of the slow tier, too; the first is one of them."""
SLOW_WEIGHT = 10
"""A step less between two samples is worth as much as this many steps less between two samples of the slow tier."""
SMOOTHING = 0.3
"""Weight of the newest sample in the running averages that steer the cadence."""
ZOOM_GAP = 4
"""Steps between two samples while zoomed in, or one more: if two or four batches take turns, samples at the same distance
would all be of the same one. The rules are calibrated on recorded runs with an interval of 5."""
ZOOM_SAMPLES = 4
"""Samples of a zoom; every second one includes the slow tier. Most rules hold for 2 or 3 samples."""
FOLLOW_UP_GAP = 48
"""Maximum number of steps from the last sample of a zoom to the next one: the trouble may have grown."""
ZOOM_SHARE = 0.2
"""Zooms may use this fraction of the budget of the run so far, or the cost of `MIN_ZOOMS` if that is more."""
MIN_ZOOMS = 2
LONGEST_BURST = 2**24
"""Steps. As good as without an end, and a number that ranks can tell each other exactly."""


class Spent(NamedTuple):
    """Cost of a sample, and the time until the next one."""

    cost_s: float
    step_s: float
    """Wall time of a step without tsemon's, mean over the steps since the sample before."""
    is_slow: bool
    """Whether it took the measures of the slow tier, too."""
    num_steps: int
    """Number of these steps."""


class NewBurst(NamedTuple):
    """A burst that has not begun."""

    steps: int
    every: int


class Burst(NamedTuple):
    """Samples that a user has asked for and that are still to come."""

    num: int
    gap: int
    """Steps between two of them."""


class Cadence:
    """Every N steps, or as often as a budget allows, and more often at a sign of trouble.

    With a budget, the gap to the next sample is what keeps cost / (gap x step time) at four fifths of it, from running
    averages of both. When a run becomes faster, one sample comes too early and the next is within the budget again; when it
    becomes slower, samples are rare for a few gaps. If early samples or a burst exceed the budget, later gaps are up to
    twice as long until the run is within the budget again; for the extra cost of the first sample, they are up to a tenth
    longer. The slow tier has its own gap: the less it costs, the shorter. Zooms may exceed the budget by a fifth, and
    later gaps make up for it.
    """

    def __init__(self, every: int | None = None, budget: float = 0.01, lag: int = 1) -> None:
        """`lag`: the cost of a sample is known this many samples later."""
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise InvalidArgument(f"every is a number of optimizer steps, expected an int of at least 1, got {every!r}")
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
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
        """Seconds spent so far beyond the aim, without the warm-up."""
        self._warm_up_s = 0.0
        """Seconds that the first sample cost more than later ones, as far as they are not saved yet."""
        self._num_steps = 0
        self._num_samples = 0
        self._num_warm_up = 1 + lag
        """Samples before the cadence trusts a measured cost: the first sample is slow because everything warms up."""
        self.gap = every or FIRST_GAP
        """Steps between two samples outside of bursts."""
        self._burst_gap = 1
        self._num_of_burst = 0
        """Samples of a burst that are still to come."""
        self._num_of_zoom = 0
        """Remaining samples of the zoom."""
        self._is_single = False
        """Whether the zoom is one sample, which came at any cost."""
        self._is_follow_up = False
        """Whether the next sample follows a zoom."""
        self._were_zoomed = deque([False] * lag)
        """Whether each sample of unknown cost belongs to a zoom, the newest last."""
        self._num_zoomed = 0
        """Samples of zooms so far."""
        self._zoomed_s = 0.0
        """Seconds spent on zooms so far."""
        self._elapsed_s = 0.0

    @property
    def is_adaptive(self) -> bool:
        """Whether it follows a budget, and not a fixed number of steps."""
        return self._every is None

    @property
    def is_slow(self) -> bool:
        """Whether the next sample takes the measures of the slow tier, too."""
        every = 2 if self.is_zoomed_in else self.slow_every
        return self._num_of_burst > 0 or self._num_since_slow >= every

    @property
    def is_zoomed_in(self) -> bool:
        """Whether the next sample belongs to a zoom."""
        return self._num_of_zoom > 0

    def zoom_in(self, at_least: int = 2, *, at_any_cost: bool = False) -> bool:
        """Take the next 4 samples 4 or 5 steps apart, and another one at most 48 steps later. If it is zoomed in already,
        take at least this many more.

        Return False if it does not zoom in: at a fixed interval, if samples are that near anyway, or if zooms have used up
        their part of the budget. In this last case `at_any_cost` takes one sample. A dense burst that ends sooner than a
        zoom would comes first.
        """
        has_room = self._may_zoom_in(is_longer=self.is_zoomed_in)
        if not self._is_wanted or not (at_any_cost or has_room):
            return False
        if not self.is_zoomed_in:
            self._is_single = not has_room
            num_before = 0 if self._is_sparse else self._num_of_burst
            self._num_of_zoom = num_before + ZOOM_SAMPLES if has_room else 1
        elif has_room:
            self._num_of_zoom = max(self._num_of_zoom, at_least)
        return True

    @property
    def lacks_room(self) -> bool:
        """Whether it does not zoom in only because zooms have used up their part of the budget."""
        return self._is_wanted and not self._may_zoom_in()

    @property
    def _is_wanted(self) -> bool:
        """Whether a zoom would add samples."""
        is_soon_over = self._num_of_burst * self._burst_gap < (ZOOM_SAMPLES - 1) * ZOOM_GAP
        return self._is_sparse or (self._every is None and self.gap > ZOOM_GAP and is_soon_over)

    @property
    def _is_sparse(self) -> bool:
        """Whether a zoom would bring the samples of a budget nearer together."""
        return self._every is None and self._calm_gap > ZOOM_GAP

    @property
    def _calm_gap(self) -> int:
        """Steps to the next sample if there is no zoom."""
        return min(self._burst_gap, self.gap) if self._num_of_burst else self.gap

    def _may_zoom_in(self, *, is_longer: bool = False) -> bool:
        """Whether there is room for a whole zoom: a part of one would not last as long as rules hold.

        is_longer: A zoom becomes longer. This leaves room for the rest of it and for another one.
        """
        if self._num_zoomed < ZOOM_SAMPLES:
            return True  # the first zoom
        usual_s, slow_s = self._costs(0.0)
        zoom_s = ZOOM_SAMPLES / 2 * (usual_s + slow_s)
        room_s = max(ZOOM_SHARE * self._budget * self._elapsed_s, MIN_ZOOMS * zoom_s)
        return self._zoomed_s + (2 if is_longer else 1) * zoom_s <= room_s

    @property
    def burst_left(self) -> Burst | None:
        """The rest of a burst."""
        return Burst(self._num_of_burst, min(self._burst_gap, self.gap)) if self._num_of_burst else None

    def end_zoom(self) -> None:
        self._num_of_zoom, self._is_follow_up = 0, False

    def burst(self, *, steps: int, every: int) -> None:
        """Sample every `every` steps or more often, slow tier included, for about `steps` steps from the next sample on."""
        self._num_of_burst, self._burst_gap, self._is_follow_up = math.ceil(steps / min(every, self.gap)), every, False
        # Without the samples of a burst that this one replaces.
        self._num_of_zoom = min(self._num_of_zoom, ZOOM_SAMPLES)
        if self.is_zoomed_in and self._is_wanted and not self._is_sparse:
            self._num_of_zoom += self._num_of_burst

    def next_gap(self, spent: Spent, *, has_tiers: bool = True) -> int:
        """Return the number of steps to the next sample.

        spent: the newest known cost. has_tiers: false if this sample only looked for the block where NaN began.
        """
        self._count(spent, is_slow=self.is_slow and has_tiers)
        if self._num_samples <= self._num_warm_up:
            if spent.is_slow:
                self._first_slow_s = spent.cost_s
            if self._every is None and self._num_samples == self._num_warm_up:
                # The cost of the first sample is too high, but the next sample should not come much later than necessary.
                num_steps = self._num_steps + FIRST_GAP * (len(self._were_zoomed) - 1)  # with those not counted yet
                latest = max(WARM_UP_STEPS - num_steps, FIRST_GAP)
                self.gap = min(max(self._gap_for(spent.cost_s, spent.step_s), FIRST_GAP), latest)
        elif self._every is None:
            self._cost_s[spent.is_slow] = _blend(self._cost_s[spent.is_slow], spent.cost_s)
            # Faster steps are believed at once, because the budget is a limit; slower ones, among them a pause, by and by.
            # The few steps between samples of a zoom or a burst may lie between two pauses.
            if self._step_s is None or 2 * spent.num_steps >= self.gap:
                self._step_s = min(_blend(self._step_s, spent.step_s), spent.step_s)
            usual_s, slow_s = self._costs(spent.cost_s)
            more_s = max(slow_s - usual_s, 0.0)
            if self._cost_s[False] is not None:
                self.slow_every = _slow_every(usual_s, more_s)
            mean_cost_s = usual_s + more_s / self.slow_every
            # A run may end at any step, so the next sample is paid for before it is taken.
            self._owed_s = max(self._owed_s, -mean_cost_s - more_s)
            repaid_s = min(max(self._owed_s + mean_cost_s, 0.0), REPAID * mean_cost_s)
            of_warm_up_s = min(self._warm_up_s, WARM_UP_REPAID * mean_cost_s)
            self._warm_up_s -= of_warm_up_s
            repaid_s += of_warm_up_s
            self.gap = self._gap_for(mean_cost_s + repaid_s, self._step_s)
        if not self._were_zoomed[-1]:
            self._num_of_burst = max(self._num_of_burst - 1, 0)
        is_over = self._num_of_zoom == 1 and not self._is_single
        self._is_follow_up = is_over and self._calm_gap > FOLLOW_UP_GAP and not self._num_of_burst
        self._num_of_zoom = max(self._num_of_zoom - 1, 0)
        if self.is_zoomed_in:
            return min(ZOOM_GAP + (self._num_zoomed + 1) % 2, self._calm_gap)
        return FOLLOW_UP_GAP if self._is_follow_up else self._calm_gap

    def _count(self, spent: Spent, *, is_slow: bool) -> None:
        self._num_since_slow = 1 if is_slow else self._num_since_slow + 1
        self._num_samples += 1
        self._num_steps += spent.num_steps
        self._elapsed_s += spent.step_s * spent.num_steps
        self._owed_s += spent.cost_s - AIM * self._budget * spent.step_s * spent.num_steps
        if self._num_samples == self._num_warm_up + 1:
            self._warm_up_s = max(self._first_slow_s - self._costs(spent.cost_s)[1], 0.0)
            self._owed_s -= self._warm_up_s
        if self._were_zoomed.popleft():
            self._zoomed_s += spent.cost_s
        self._were_zoomed.append((self.is_zoomed_in or self._is_follow_up) and self._is_sparse)
        self._num_zoomed += self._were_zoomed[-1]

    def _costs(self, newest_s: float) -> tuple[float, float]:
        """Return the cost of a usual sample and of one with the slow tier. `newest_s`: the cost of the newest sample."""
        usual_s = self._cost_s[False] or newest_s
        # The first sample also paid for the warm-up, so it only bounds what the next one of the slow tier will cost.
        return usual_s, self._cost_s[True] or min(self._first_slow_s, 2 * usual_s)

    def _gap_for(self, cost_s: float, step_s: float) -> int:
        wanted = cost_s / (AIM * self._budget * step_s) if step_s else MAX_GAP
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
