"""Signs of trouble between two samples, which make the monitor sample more often.

All of this runs at every step, on numbers that have arrived on the host.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from tsemon.late import LateNumbers
from tsemon.probes import Asked, PastLosses, Ranks
from tsemon.schedule import ZOOM_GAP, ZOOM_SAMPLES, NewBurst
from tsemon.wire import ASKED, Alert

USUAL_STEPS = 12
"""Time constant of the running mean of the loss, in steps."""
NOISE_STEPS = 48
"""Time constant of the running deviation."""
FIRST_STEPS = 24
"""Number of losses before a jump can be detected."""
HIGH = 3.0
"""A loss is high if it is this many mean absolute deviations above its running mean: 2.4 standard deviations."""
HIGH_OF_GAIN = 0.05
"""It must also exceed the mean by this fraction of the improvement so far: losses near zero are small and uneven."""
EVEN, MAX_GAIN_OF_EVEN = 0.25, 10.0
"""If logarithms deviate by less than this, losses are even, and at most ten times their mean counts as improvement.
Otherwise, a first loss of 300 would hide all later jumps."""
LEAST_RISE = 1e-6
"""It must exceed the mean by this much: the rounding of a float32 loss."""
NUM_HIGH = 5
"""Number of high losses in a row that make a jump."""
NUM_HIGH_IN_LOGS = 3
"""The same if their logarithms are high, too. Near zero, some healthy losses are ten times as large as others. If
`NUM_HIGH` uneven losses in a row have raised logarithms, only this many must be high."""
HIGH_IN_LOGS, RAISED_IN_LOGS = 2.7, 2.0
"""Mean absolute deviations from which on a logarithm is high, or raised."""
TALLER, TALLEST = 1.5, 8.0
"""If losses of neighboring steps are alike, as with documents in order, healthy ones jump. Each jump then raises the
threshold of the next one by this factor, up to this many times the first threshold."""
ALIKE = 0.3
"""Neighboring losses are alike if their autocorrelation at lag 1 is above it. For independent ones it is below 0.2 in
98 % of steps."""
RISE_STEPS = 48
"""Time constant of a second running mean, which shows a slow rise."""
RISE = 0.9
"""It has risen if it is this many mean absolute deviations of the loss above its lowest value: seven standard errors
if losses are independent. Fewer would be reached by chance within thousands of steps."""
RISE_OF_GAIN = 0.1
"""It must also be this fraction of the improvement so far: healthy runs lose 0.09 after other data or a restart."""

NUM_SMOOTH, NUM_USUAL = 12, 48
"""Number of bends whose median is compared with the median of earlier bends, and number of these."""
SMOOTH = 0.1
"""The loss is smooth if the first median is less than this fraction of the second one."""
CHECK_EVERY = 8
"""Steps between two comparisons. A loss that is clearly not high waits this long, too, for the others to be watched."""
MAX_ZEROS = 2
"""Number of usual bends that may be 0. More are there if the loss is rounded more coarsely than it varies."""

NUM_NORMS_NOT_FINITE = 3
"""Gradient norms in a row that are not finite. A gradient scaler skips single steps on purpose."""
NUM_NORMS_FINITE = 10
"""Gradient norms in a row that are finite once a gradient scaler has found its scale. Before, it skips most steps."""

NORM_EVERY = 4
"""Steps between two gradient norms that are read from a GPU: each copy costs the training thread tens of microseconds."""

PATIENCE = 60
"""Steps for which a pending alert counts as a sign. Built-in rules hold for 50 steps or less. One that fires without having
been pending counts until a zoom has shown the sub-step."""
MAX_PER_HOUR = 12
"""Maximum number of zooms per hour."""
TO_SAVE = "to keep to the budget"
OFTEN = f"after {MAX_PER_HOUR} zooms within an hour"
SHARE_EVERY = (ZOOM_SAMPLES - 1) * ZOOM_GAP
"""Steps between two exchanges of signs among ranks: the next one comes before a zoom is over, so that it can continue."""


class Sign(NamedTuple):
    """A reason to sample more often."""

    reason: str
    is_urgent: bool
    """Whether the newest step gave it: then the next step is sampled, however recent the last sample is."""
    is_decisive: bool = False
    """Whether the next step is sampled even if there is no zoom. Such a sign is urgent, and each process has one at most."""


def _weight(sign: Sign) -> int:
    return sign.is_urgent + sign.is_decisive


def _heavier(first: Sign | None, then: Sign | None) -> Sign | None:
    if first is None or then is None:
        return first or then
    return then if _weight(then) > _weight(first) else first


class Refusals(NamedTuple):
    """The signs that led to no zoom, and the newest of them."""

    num: int
    step: int
    cause: str
    """Reason for which there was no zoom."""
    reason: str
    """Reason for which there would have been a zoom."""


class LossWatch:
    """Detects a loss that is not finite or below zero, a jump and a slow rise, from the losses of all steps.

    The thresholds are calibrated on the losses of the recorded runs: every defect there that makes the loss jump is
    detected within 4 steps, and one healthy run gives a sign, whose loss quadruples within ten steps.
    """

    def __init__(self, highest: float = -math.inf) -> None:
        """highest: a loss before the first one that is watched."""
        self._is_finite = True
        self._num_positive: float = 0
        """Number of losses so far if all were above 0, or -inf."""
        self._highest = highest
        """The highest running mean before the first jump: after a loss of 1000, no other jump would be large."""
        self._has_jumped = False
        self._taller = 1.0
        """Factor of the threshold of another jump if neighboring losses are alike."""
        self._large = 1.0
        """How many times larger than the first slow rise another one must be: twice as large as the one before."""
        self._restart()

    def _restart(self) -> None:
        self._losses, self._logs, self._slow = _Usual(), _Usual(), _Usual(RISE_STEPS)
        self._lowest = math.inf
        """The lowest mean of `_slow`."""
        self._num_high = self._num_high_in_logs = 0
        self._raised = deque[float]()
        """The newest losses with raised logarithms in a row, at most `NUM_HIGH`. It is not clear yet whether they stay."""

    def notice(self, loss: float) -> str | None:
        """Take the loss of the next step. Return the problem in words, once each time it begins. A slow rise begins
        again when it has become much larger."""
        if not math.isfinite(loss):
            was_finite, self._is_finite = self._is_finite, False
            return "the loss is not finite" if was_finite else None
        self._is_finite = True
        was_positive, self._num_positive = self.floor == 0, self._num_positive + 1 if loss > 0 else -math.inf
        if was_positive and loss < 0:
            return f"the loss fell below zero for the first time: {loss:.4g} after about {self._losses.mean:.4g}"
        limit, height = self.limit, self._height_in_logs(loss)
        is_high, is_raised = loss > limit, height > RAISED_IN_LOGS and not self._is_even
        rise = self._settle(limit, NUM_HIGH - 1 if is_raised else 0)
        if is_raised:
            self._raised.append(loss)
        elif not is_high:  # the running mean ignores high losses until it is clear whether they stay
            rise = self._take(loss) or rise
        self._num_high = self._num_high + 1 if is_high else 0
        self._num_high_in_logs = self._num_high_in_logs + 1 if is_high and not height <= HIGH_IN_LOGS else 0
        stays = len(self._raised) == NUM_HIGH and sum(other > limit for other in self._raised) >= NUM_HIGH_IN_LOGS
        if self._num_high < NUM_HIGH and self._num_high_in_logs < NUM_HIGH_IN_LOGS and not stays:
            return rise
        text = f"the loss jumped from about {self._losses.mean:.4g} to {loss:.4g}"
        self._has_jumped, self._taller = True, min(TALLER * self._taller, TALLEST)
        self._restart()
        return text

    def _settle(self, limit: float, num_left: int) -> str | None:
        """Take all but the newest losses with raised logarithms, because they make no jump. A high one is ignored."""
        rise = None
        while len(self._raised) > num_left:
            if (loss := self._raised.popleft()) <= limit:
                rise = self._take(loss) or rise
        return rise

    def _take(self, loss: float) -> str | None:
        """Take a usual loss."""
        self._losses.add(loss)
        if loss > 0:
            self._logs.add(math.log(loss))
        if not self._has_jumped:
            self._highest = max(self._highest, self._losses.mean)
        if self._losses.num == FIRST_STEPS and 0 < loss < self._losses.mean / 2:  # the first ones would count for long
            self._losses, self._logs = _Usual(), _Usual()
        return self._notice_rise(loss)

    def _notice_rise(self, loss: float) -> str | None:
        slow = self._slow
        slow.add(loss)
        if slow.num < RISE_STEPS:
            return None
        self._lowest = min(self._lowest, slow.mean)
        least = max(1e-3 * abs(slow.mean), LEAST_RISE)
        high = max(RISE * slow.deviation, RISE_OF_GAIN * (self._highest - self._lowest)) + least
        if slow.mean - self._lowest <= self._large * high:
            return None
        self._large *= 2
        text = f"the loss rose slowly from about {self._lowest:.4g} to {slow.mean:.4g}"
        self._slow, self._lowest = _Usual(RISE_STEPS), math.inf
        return text

    @property
    def floor(self) -> float:
        """A loss below it has another sign than all before."""
        return 0.0 if self._num_positive >= FIRST_STEPS else -math.inf

    @property
    def limit(self) -> float:
        """A loss above it is high."""
        usual = self._losses
        if usual.num < FIRST_STEPS:
            return math.inf
        least = max(1e-3 * abs(usual.mean), LEAST_RISE)  # for a loss that hardly varies
        gain = min(self._highest - usual.mean, MAX_GAIN_OF_EVEN * usual.mean if self._is_even else math.inf)
        height = max(HIGH * usual.deviation, HIGH_OF_GAIN * gain)
        factor = self._taller if usual.autocorrelation > ALIKE else 1.0
        return usual.mean + factor * height + least

    def is_far(self, before: float, limit: float) -> bool:
        """Whether the limit has fallen by a tenth of its height above the mean."""
        return not before - limit <= 0.1 * (limit - self._losses.mean)

    @property
    def is_undecided(self) -> bool:
        """Whether the next losses may make a jump, though each of them is below the limit."""
        return len(self._raised) > 1

    @property
    def _is_even(self) -> bool:
        return self._logs.num >= FIRST_STEPS and self._logs.deviation < EVEN

    def _height_in_logs(self, loss: float) -> float:
        """Height of its logarithm above the mean, in mean absolute deviations. NaN if it is not known."""
        usual = self._logs
        if loss <= 0 or usual.num < FIRST_STEPS or usual.deviation == 0:
            return math.nan
        return (math.log(loss) - usual.mean) / usual.deviation


class _Usual:
    """Running mean, mean absolute deviation, and autocorrelation of the deviations."""

    def __init__(self, num_steps: int = USUAL_STEPS) -> None:
        self._num_steps = num_steps
        self.num = 0
        self.mean = self.deviation = 0.0
        self._newest = self._variance = self._covariance = 0.0

    def add(self, number: float) -> None:
        self.num += 1
        distance = number - self.mean
        self.mean += distance * max(1 / self.num, 1 / self._num_steps)
        if self.num > 1:
            weight = max(1 / self.num, 1 / NOISE_STEPS)
            self.deviation += (abs(distance) - self.deviation) * weight
            self._variance += (distance * distance - self._variance) * weight
            self._covariance += (distance * self._newest - self._covariance) * weight
            self._newest = distance

    @property
    def autocorrelation(self) -> float:
        """The autocorrelation of neighboring deviations from the mean; 0 before the second number."""
        return self._covariance / self._variance if self._variance else 0.0


class NoiseWatch:
    """Detects that the loss no longer varies from step to step: each batch is the same, or no longer matters.

    A bend is |a - 2 b + c| for the logarithms a, b, c of three losses: it is small if the loss falls steeply, but evenly.
    Calibrated on the losses of the recorded runs: both with a stuck loader give a sign within 8 steps, and one of the
    healthy ones does, which learns its task exactly.
    """

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=3)
        self._bends: deque[float] = deque(maxlen=NUM_USUAL + NUM_SMOOTH)
        self._num = 0
        self._is_smooth = False

    def notice(self, loss: float) -> str | None:
        """Take the loss of the next step. Return the problem in words, once each time it begins."""
        self._num += 1
        if not math.isfinite(loss) or loss == 0:
            return None
        self._logs.append(math.log(abs(loss)))
        if len(self._logs) < 3:
            return None
        a, b, c = self._logs
        self._bends.append(abs(a - 2 * b + c))
        if self._num % CHECK_EVERY or len(self._bends) < NUM_USUAL + NUM_SMOOTH:
            return None
        bends = list(self._bends)
        usual, newest = sorted(bends[:NUM_USUAL]), sorted(bends[NUM_USUAL:])
        was_smooth = self._is_smooth
        self._is_smooth = usual[MAX_ZEROS] > 0 and newest[NUM_SMOOTH // 2] < SMOOTH * usual[NUM_USUAL // 2]
        return "the loss hardly varies from step to step" if self._is_smooth and not was_smooth else None


class Suspicion:
    """Decides at every step whether to sample more often."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._late_losses, self._late_norms = LateNumbers(), LateNumbers()
        self._losses, self._noise = LossWatch(), NoiseWatch()
        self._usual: list[float] = []
        """The newest losses, which are clearly not high. They are watched together: each alone would take three times as
        long, because a training step empties the caches of the processor."""
        self.floor, self.limit = -math.inf, math.inf
        """Between these, a loss is usual: clearly not high, and of the usual sign."""
        self.is_limit_moving = True
        """Whether it has fallen by much since the losses before, or is not known yet."""
        self._waiting: Sign | None = None
        """A sign that `watch` has found."""
        self._num_norms_not_finite = 0
        self._num_norms_finite = 0
        """Finite norms in a row; it stays at `NUM_NORMS_FINITE`."""
        self._was_loss_finite = True
        """Whether all losses were finite so far."""
        self._followed: dict[str, int] = {}
        """Ids of the pending and firing alerts, and the step at which each was first seen."""
        self._fresh: frozenset[str] = frozenset()
        """Ids of the alerts that count as a sign."""
        self._answered: frozenset[str] = frozenset()
        """Ids of the alerts with a zoom, or with a refused one."""
        self._settled: Collection[Alert] = ()
        """The alerts of a reply, once no alert in it counts as a sign. None will at a later step."""
        self.refusals: Refusals | None = None
        self._num_losses = 0
        """Number of losses that have arrived."""
        self.has_grad_norm = False
        """The same of the norm of the gradient."""
        self._begun_at: deque[float] = deque(maxlen=MAX_PER_HOUR)
        self._now_s = now_s

    @property
    def num_losses(self) -> int:
        """Number of losses that it was given and that have arrived or were skipped."""
        return self._num_losses + self._late_losses.num_skipped

    def sign(
        self, step: int, loss: object, grad_norm: object, alerts: Collection[Alert], *, is_zoomed_in: bool
    ) -> Sign | None:
        """Return a reason to sample more often from `step` on, if there is one.

        loss, grad_norm: of the step before, if given. alerts: from the newest reply of the server.
        """
        if isinstance(grad_norm, torch.Tensor) and not grad_norm.is_cpu and step % NORM_EVERY:
            grad_norm = None
        sign = self._of_numbers(loss, grad_norm) or self._of_alerts(step, alerts, is_zoomed_in=is_zoomed_in)
        if is_zoomed_in:
            self._answered |= self._fresh
        elif sign is not None and not self._may_begin and not sign.is_decisive:
            self.refuse(step, sign, OFTEN)
            return None
        return sign

    def is_settled(self, alerts: Collection[Alert]) -> bool:
        """Whether the next usual numbers can wait for `watch`: nothing else is a sign, or may become one."""
        return alerts is self._settled and self._waiting is None and not self._late_losses and not self._late_norms

    def watch(self, losses: Sequence[float], norms: Sequence[float]) -> None:
        """Take usual losses and finite gradient norms of several steps. If they are a sign, `sign` returns it next."""
        if norms:
            self.has_grad_norm = True
            self._num_norms_not_finite = 0
            self._num_norms_finite = min(self._num_norms_finite + len(norms), NUM_NORMS_FINITE)
        if losses:
            self._num_losses += len(losses)
            self._usual += losses
            self._waiting = self._watch()

    def continue_from(self, past: PastLosses) -> None:
        """Compare the next losses with the ones before a checkpoint."""
        self._losses, self._noise = LossWatch(max(past.first, default=-math.inf)), NoiseWatch()
        self._usual = [loss for loss in past.last if math.isfinite(loss)]
        self._watch()

    def begins(self) -> None:
        """Count a zoom that begins now."""
        self._begun_at.append(self._now_s())
        self._answered |= self._fresh

    def refuse(self, step: int, sign: Sign, cause: str) -> None:
        """Count a sign that leads to no zoom."""
        num = 1 if self.refusals is None else self.refusals.num + 1
        self.refusals = Refusals(num, step, cause, sign.reason)
        self._answered |= self._fresh

    @property
    def _may_begin(self) -> bool:
        return len(self._begun_at) < MAX_PER_HOUR or self._now_s() - self._begun_at[0] >= 3600.0

    def _of_numbers(self, loss: object, grad_norm: object) -> Sign | None:
        sign, self._waiting = self._waiting, None
        for number in self._late_losses.put(loss):
            self._num_losses += 1
            self._usual.append(number)
            if not self.floor < number < self.limit or len(self._usual) >= CHECK_EVERY:
                sign = _heavier(sign, self._watch())
        for number in self._late_norms.put(grad_norm):
            self._count_norm(number)
            if self._num_norms_not_finite == NUM_NORMS_NOT_FINITE:
                sign = _heavier(sign, Sign("the gradient norm is not finite", is_urgent=True))
        return sign

    def _count_norm(self, norm: float) -> None:
        self.has_grad_norm = True
        is_finite, is_settled = math.isfinite(norm), self._num_norms_finite >= NUM_NORMS_FINITE
        self._num_norms_not_finite = 0 if is_finite else self._num_norms_not_finite + is_settled
        if not is_settled:
            self._num_norms_finite = self._num_norms_finite + 1 if is_finite else 0

    def _watch(self) -> Sign | None:
        """Watch the newest losses."""
        sign = None
        for loss in self._usual:
            is_first = self._was_loss_finite and not math.isfinite(loss)
            self._was_loss_finite &= not is_first
            for text in filter(None, (self._losses.notice(loss), self._noise.notice(loss))):
                sign = _heavier(sign, Sign(text, is_urgent=True, is_decisive=is_first))
        before, self._usual = self.limit, []
        self.floor, self.limit = self._losses.floor, self._losses.limit
        self.is_limit_moving = self._losses.is_far(before, self.limit)
        if self._losses.is_undecided:
            self.limit = -math.inf
        return sign

    def _of_alerts(self, step: int, alerts: Collection[Alert], *, is_zoomed_in: bool) -> Sign | None:
        if alerts is self._settled:
            return None
        known = {a.alert_id: a for a in alerts if a.state in ("pending", "firing") and a.severity != "info"}
        self._followed = {alert_id: self._followed.get(alert_id, step) for alert_id in known}
        self._answered &= known.keys()
        fresh = [
            alert_id
            for alert_id, since in self._followed.items()
            if step - since <= PATIENCE and (known[alert_id].state == "pending" or alert_id not in self._answered)
        ]
        self._fresh = frozenset(fresh)
        for alert_id in fresh:
            if is_zoomed_in or alert_id not in self._answered:
                alert = known[alert_id]
                reason = f"{alert.rule} {'is pending' if alert.state == 'pending' else 'fires'}"
                return Sign(ASKED if alert.rule == ASKED else reason, is_urgent=False)
        if not fresh:
            self._settled = alerts
        return None


class SharedSigns:
    """Exchanges signs and bursts among ranks every 12 steps, so that all of them sample the same steps."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._own: Sign | None = None
        """The first sign of this rank since the last exchange."""
        self._own_burst: NewBurst | None = None
        """The newest burst that this rank has asked for since then."""
        self._sent_burst: NewBurst | None = None
        """Its burst in the exchange that is on its way."""
        self._sent: Sign | None = None
        self._asked: Asked | None = None

    def exchange(self, step: int, own: Sign | None, burst: NewBurst | None) -> tuple[Sign | None, NewBurst | None]:
        """Return a sign and a burst of any rank, on all ranks at the same step, 12 to 23 steps after they came up.

        All ranks call it at every step. own, burst: of this rank, if there is one. If several ranks ask for bursts, the
        largest number of steps and the smallest gap count.
        """
        self._own, self._own_burst = _heavier(self._own, own), burst or self._own_burst
        if self._ranks.is_broken:
            burst, self._own_burst, self._sent_burst = self._own_burst or self._sent_burst, None, None
            return None, burst
        if step % SHARE_EVERY:
            return None, None
        sign, burst = self._answer()
        self._sent, self._own = self._own, None
        # The largest number is that of a decisive sign, if there is one, or else of an urgent one.
        number = 0 if self._sent is None else 1 + self._ranks.rank + self._ranks.size * _weight(self._sent)
        steps, every = self._own_burst or (0, math.inf)
        self._asked = self._ranks.ask((number, steps, -every), self._device)
        self._sent_burst, self._own_burst = self._own_burst, None
        return sign, burst

    def _answer(self) -> tuple[Sign | None, NewBurst | None]:
        number, steps, minus_every = (0.0, 0.0, 0.0) if self._asked is None else self._ranks.answer(self._asked)
        burst = NewBurst(int(steps), -int(minus_every)) if steps else None
        if not number:
            return None, burst
        weight, rank = divmod(int(number) - 1, self._ranks.size)
        reason = f"rank {rank} has a sign of trouble" if self._sent is None else self._sent.reason
        return Sign(reason, is_urgent=weight > 0, is_decisive=weight > 1), burst

    def finish(self, until: float) -> None:
        """Wait for the last exchange until this time. If a process ends before, the others may wait for ever."""
        if self._asked is None or self._ranks.is_broken:
            return
        while not self._asked.work.is_completed() and time.monotonic() < until:
            time.sleep(1e-3)
