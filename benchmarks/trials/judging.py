"""When the harm began, when a rule on the loss alone would have told, and when the alerts did."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trials.recording import Trial
from tsemon_server.services.replay.replaying import Replayed

NEVER = math.inf
ALSO_RIGHT = {"diverge": {"loss"}, "data": {"loss"}}
"""Families of rules that name a failure as well as its own does. What is `fresh` has no right name."""


@dataclass(frozen=True)
class Alarm:
    """An alert that fired, of a severity above info."""

    rule: str
    family: str
    step: int
    severity: str


@dataclass(frozen=True)
class Told:
    """An incident as it was when the run had ended."""

    rule: str
    family: str
    step: int
    severity: str
    where: str | None
    """Its blocks in words."""


def smoothed(loss: Sequence[float], width: int) -> list[float]:
    """The mean of the last `width` losses at each step; a loss that is not finite counts as a huge one."""
    window = deque[float](maxlen=width)
    means = []
    for value in loss:
        window.append(value if math.isfinite(value) else 1e9)
        means.append(sum(window) / len(window))
    return means


def steps_behind(loss: Sequence[float], twin: Sequence[float]) -> list[int]:
    """The steps at which the loss, smoothed over 10 steps, lies above the control run's by 5 % of all that it learns."""
    ours, theirs = smoothed(loss, 10), smoothed(twin, 10)
    margin = 0.05 * max(theirs[0] - min(theirs), 1e-6)
    return [step for step, (a, b) in enumerate(zip(ours, theirs, strict=False)) if not a - b <= margin]


def onset(loss: Sequence[float], twin: Sequence[float]) -> float:
    """The step from which on the run stays behind its control run."""
    behind = set(steps_behind(loss, twin))
    fine = [step for step in range(min(len(loss), len(twin))) if step not in behind]
    died = len(loss) < len(twin) or not math.isfinite(loss[-1])
    if not died and fine and fine[-1] == min(len(loss), len(twin)) - 1:
        return NEVER
    return fine[-1] + 1 if fine else 0


# Rules on the loss alone. Each returns the step at which it would have told.


def not_finite(loss: Sequence[float]) -> float:
    return next((step for step, value in enumerate(loss) if not math.isfinite(value)), NEVER)


def spike(loss: Sequence[float]) -> float:
    """Five losses in a row at twice the mean of the 100 before each, as llm-foundry has it."""
    num_high = 0
    for step in range(100, len(loss)):
        mean = statistics.fmean(min(value, 1e6) if not math.isnan(value) else 1e6 for value in loss[step - 100 : step])
        num_high = num_high + 1 if not loss[step] < 2 * mean else 0
        if num_high == 5:
            return step
    return NEVER


def unlikely(loss: Sequence[float]) -> float:
    """Three losses in a row more than six standard deviations above the mean of 30, which end three steps before."""
    num_high = 0
    for step in range(30, len(loss)):
        end = max(step - 3, 30)
        window = loss[end - 30 : end]
        mean = statistics.fmean(window)
        deviation = statistics.pstdev(window, mean) if all(map(math.isfinite, window)) else math.inf
        num_high = num_high + 1 if not loss[step] - mean <= 6 * (deviation + 1e-3 * abs(mean) + 1e-9) else 0
        if num_high == 3:
            return step
    return NEVER


def plateau(loss: Sequence[float]) -> float:
    """100 steps in which the loss, smoothed over 20, has not become better than its best by 1 %."""
    best, since = math.inf, 0
    for step, value in enumerate(smoothed(loss, 20)):
        if step < 20:
            continue
        if value < best - 0.01 * abs(best) or math.isinf(best):
            best, since = value, step
        elif step - since >= 100:
            return step
    return NEVER


ACCIDENTS: tuple[Callable[[Sequence[float]], float], ...] = (not_finite, spike, unlikely)


@dataclass(frozen=True)
class Verdict:
    """What became of one training."""

    trial: Trial
    num_steps: int
    onset: float
    accident: float
    """When a rule on the loss would have told of NaN, a spike or an unlikely loss."""
    standstill: float
    """The same with the plateau rule."""
    alarms: tuple[Alarm, ...]
    incidents: tuple[Told, ...]
    """In the order in which they were reported."""

    @property
    def is_harmed(self) -> bool:
        return self.trial.is_failing and self.onset < NEVER

    @property
    def false(self) -> tuple[Alarm, ...]:
        """Alarms for nothing: in a healthy run, or before the defect."""
        before = self.trial.event_step if self.trial.is_failing else NEVER
        return tuple(alarm for alarm in self.alarms if alarm.step < before)

    @property
    def right(self) -> tuple[Alarm, ...]:
        return tuple(alarm for alarm in self.alarms if alarm not in self.false)

    @property
    def first(self) -> Alarm | None:
        """Of several at one step, one that names the failure."""
        return min(self.right, key=lambda alarm: (alarm.step, not self.names(alarm)), default=None)

    @property
    def first_inner(self) -> Alarm | None:
        """The first of a rule that does not read the loss."""
        inner = (alarm for alarm in self.right if alarm.family != "loss")
        return min(inner, key=lambda alarm: alarm.step, default=None)

    def names(self, told: Alarm | Told) -> bool:
        """Whether it says what kind of failure it is."""
        family = self.trial.family
        return family == "fresh" or told.family == family or told.family in ALSO_RIGHT.get(family, ())

    @property
    def incident(self) -> Told | None:
        """The first incident from the defect on."""
        begin = self.trial.event_step if self.trial.is_failing else 0
        return next((incident for incident in self.incidents if incident.step >= begin), None)

    @property
    def is_named(self) -> bool:
        """True if the verdict is of the right family."""
        return self.incident is not None and self.names(self.incident)

    @property
    def is_named_exactly(self) -> bool:
        """True if the verdict is of the same family, and not only of one in `ALSO_RIGHT`."""
        return self.incident is not None and self.incident.family == self.trial.family

    @property
    def is_misled(self) -> bool:
        """True if a critical incident came before the defect or is of a wrong family."""
        begin = self.trial.event_step if self.trial.is_failing else NEVER
        return any(
            incident.severity == "critical" and not (incident.step >= begin and self.names(incident))
            for incident in self.incidents
        )

    def lead(self, over: float) -> float:
        """Steps from the first inner alarm to a rule on the loss; one that never told counts as the run's end."""
        inner = self.first_inner
        return math.nan if inner is None else min(over, self.num_steps - 1) - inner.step


def judge(
    trial: Trial,
    loss: Sequence[float],
    twin: Sequence[float] | None,
    alarms: Sequence[Alarm],
    incidents: Sequence[Told],
) -> Verdict:
    """`twin` is the loss of the healthy twin, where there is one."""
    begin = NEVER
    if trial.is_failing:
        begin = onset(loss, twin) if trial.shows_in_loss and twin is not None else trial.event_step
    accident = min(rule(loss) for rule in ACCIDENTS)
    return Verdict(trial, len(loss), begin, accident, min(accident, plateau(loss)), tuple(alarms), tuple(incidents))


def judge_replayed(trial: Trial, loss: Sequence[float], twin: Sequence[float] | None, replayed: Replayed) -> Verdict:
    """Judge by the alerts and incidents of a replay."""
    alerts = [one for one in replayed.alerts if one.severity != "info"]
    alarms = [Alarm(one.rule, one.family, one.firing_step, one.severity) for one in alerts]
    incidents = [Told(one.rule, one.family, one.step, one.severity, one.where) for one in replayed.incidents]
    return judge(trial, loss, twin, alarms, incidents)


@dataclass(frozen=True)
class Summary:
    """Figures over the harmed runs of a family, or of all."""

    num_runs: int
    recall: float
    named: float
    """Fraction of runs whose verdict is of the right family."""
    incidents_per_run: float
    alarms_per_run: float
    misled: float
    """Fraction of runs with a critical incident of a wrong family."""
    accident_recall: float
    """What rules on the loss call."""
    standstill_recall: float
    """The same with the plateau rule."""
    lead_over_accident: float
    lead_over_standstill: float
    delay: float
    """Median steps from the onset to the first alarm."""

    @staticmethod
    def of(verdicts: Sequence[Verdict]) -> Summary:
        delays = [v.first.step - v.onset for v in verdicts if v.first is not None]
        told = [v for v in verdicts if v.first_inner is not None]
        return Summary(
            len(verdicts),
            len(delays) / len(verdicts),
            sum(v.is_named for v in verdicts) / len(verdicts),
            sum(len(v.incidents) for v in verdicts) / len(verdicts),
            sum(len(v.alarms) for v in verdicts) / len(verdicts),
            sum(v.is_misled for v in verdicts) / len(verdicts),
            sum(v.accident < NEVER for v in verdicts) / len(verdicts),
            sum(v.standstill < NEVER for v in verdicts) / len(verdicts),
            _median([v.lead(v.accident) for v in told]),
            _median([v.lead(v.standstill) for v in told]),
            _median(delays),
        )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan
