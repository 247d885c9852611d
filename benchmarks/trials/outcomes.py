"""Tables of trainings at default settings, in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from trials.judging import NEVER, Verdict
from trials.recording import Losses
from trials.report import conditions, told
from tsemon.status import Status


@dataclass(frozen=True)
class Outcome:
    """A training that was watched."""

    verdict: Verdict
    status: Status
    losses: Losses
    trained_s: float
    """CPU time of the process."""
    beside_s: float
    """CPU time of the threads that send the frames."""
    is_repeatable: bool
    """Whether a replay of the stored frames gives the alerts that the run gave."""

    @property
    def num_samples(self) -> int:
        return self.status.delivery.num_sent

    @property
    def delay(self) -> float:
        """Steps from the onset of the harm to the first alert; negative if the alert comes first."""
        first = self.verdict.first
        return math.nan if first is None else first.step - self.verdict.onset

    def behind(self, step: float) -> float:
        """Number of steps from this step to the first alert; NaN if the step is `NEVER`."""
        first = self.verdict.first
        return math.nan if step == NEVER else (NEVER if first is None else first.step) - step

    @property
    def step_ms(self) -> float:
        """CPU time of the training over its number of steps, including evaluations and earlier training."""
        return 1e3 * self.trained_s / self.verdict.num_steps

    @property
    def overhead(self) -> float:
        """tsemon's fraction of the CPU time, on all threads."""
        beside = self.beside_s / self.trained_s
        return self.status.overhead_ratio * (1 - beside) + beside

    @property
    def zooms(self) -> str:
        zooms = self.status.zooms
        return "-" if zooms is None else f"{zooms.num}, from {zooms.step} on: {zooms.reason}"

    def __str__(self) -> str:
        trial, first = self.verdict.trial, self.verdict.first
        cells = (
            trial.name,
            trial.family,
            str(self.verdict.num_steps),
            str(self.num_samples),
            self.zooms,
            f"{self.overhead:.2%}",
            str(self.verdict.onset),
            str(self.verdict.accident),
            "-" if first is None else f"{first.step} {first.rule}",
            f"{self.delay:+.0f}" if self.verdict.is_harmed else "not harmed",
            str(len(self.verdict.false)),
        )
        return f"| {' | '.join(cells)} |"

    @property
    def healthy_row(self) -> str:
        trial, losses = self.verdict.trial, self.losses.loss
        cells = (
            trial.name,
            trial.about,
            f"{self.verdict.num_steps:,}",
            f"{self.step_ms:.1f}",
            f"{statistics.fmean(losses[:5]):.3g} to {statistics.fmean(losses[-20:]):.3g}",
            str(self.num_samples),
            self.zooms,
            f"{self.overhead:.2%}",
            ", ".join(f"{alarm.rule} at {alarm.step}" for alarm in self.verdict.alarms) or "-",
        )
        return f"| {' | '.join(cells)} |"


MAX_OVERHEAD = 0.012
"""A healthy run of 5,000 steps should cost no more than this fraction of CPU time."""
HEAD = "| run | family | steps | samples | zoomed in | overhead | onset | loss rules | first alert | delay | false |"
HEALTHY_HEAD = "| run | setting | steps | step, ms | loss | samples | zoomed in | overhead | alerts |"


def live_tables(outcomes: Sequence[Outcome], name: str) -> dict[str, list[str]]:
    """The tables by the marks around them in docs/detection.md. name: `live` or `unseen`."""
    return {
        f"{name} conditions": [conditions(len(outcomes)).strip()],
        f"{name} defects": list(_defects(outcomes)),
        f"{name} summary": _live_summary(outcomes),
    }


def healthy_tables(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    return {"long conditions": [conditions(len(outcomes)).strip()], "long summary": _healthy_summary(outcomes)}


def gap_table(outcomes: Sequence[Outcome], gap: int | None, *, has_zooms: bool) -> dict[str, list[str]]:
    """A line on one number of samples. gap: steps between two samples outside of zooms; None for the default."""
    harmed = [o for o in outcomes if o.verdict.is_harmed]
    found = [o for o in harmed if o.verdict.first is not None]
    place = f"live gap {gap or 'default'}{'' if has_zooms else ' without zooms'}"
    cadence = f"a gap of {gap} steps" if gap else "the default cadence"
    line = (
        f"* {cadence}, {'with' if has_zooms else 'without'} zooms: {len(found)} of {len(harmed)} harmed runs found, "
        f"delay {_median(o.delay for o in found):.0f} steps (median); verdict of the right family: "
        f"{sum(o.verdict.is_named for o in harmed)}; false alerts: {sum(len(o.verdict.false) for o in outcomes)} in "
        f"{len(outcomes)} runs"
    )
    return {place: [line]}


def _defects(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A row for each defect, all seeds together."""
    yield "| training | defect | family | found | delay | first alerts | verdict right | verdicts |"
    yield "|---|---|---|---|---|---|---|---|"
    by_kind: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        trial = outcome.verdict.trial
        if trial.is_failing:
            by_kind.setdefault((trial.name.rpartition("-")[0], trial.about, trial.family), []).append(outcome)
    for kind, group in by_kind.items():
        harmed = [o for o in group if o.verdict.is_harmed]
        found = [(o.delay, o.verdict.first.rule) for o in harmed if o.verdict.first is not None]
        delays = ", ".join(f"{delay:+.0f}" for delay, _ in found) or "-"
        rules = ", ".join(dict.fromkeys(rule for _, rule in found)) or "-"
        right = f"{sum(o.verdict.is_named for o in harmed)} of {len(harmed)}"
        verdicts = ", ".join(dict.fromkeys(told(o.verdict) for o in harmed))
        yield f"| {' | '.join(kind)} | {len(found)} of {len(harmed)} | {delays} | {rules} | {right} | {verdicts} |"


def _live_summary(outcomes: Sequence[Outcome]) -> list[str]:
    harmed = [o for o in outcomes if o.verdict.is_harmed]
    found = [o for o in harmed if o.verdict.first is not None]
    healthy = [o for o in outcomes if not o.verdict.trial.is_failing]
    zoomed = [o.verdict.trial.name for o in healthy if o.status.zooms is not None]
    behind, behind_plateau = (
        [f"{o.verdict.trial.name} ({steps:+.0f})" for o in harmed if (steps := o.behind(of(o.verdict))) > 5]
        for of in (attrgetter("accident"), attrgetter("standstill"))
    )
    known = [o for o in harmed if o.verdict.trial.family != "fresh"]
    num_plateaus = sum(o.verdict.standstill < NEVER for o in healthy)
    return [
        f"* {len(found)} of {len(harmed)} harmed runs found, delay {_median(o.delay for o in found):.0f} steps (median)",
        f"* verdict of the right family: {sum(o.verdict.is_named for o in harmed)} of {len(harmed)}; "
        f"{sum(o.verdict.is_named_exactly for o in known)} of {len(known)} without `fresh` runs, and if `loss` is wrong for "
        "`diverge` and `data`",
        f"* a critical incident of a wrong family: {_listed([o.verdict.trial.name for o in harmed if o.verdict.is_misled])}",
        f"* incidents in each harmed run: {statistics.fmean([len(o.verdict.incidents) for o in harmed] or [math.nan]):.2f}, "
        f"at most {max((len(o.verdict.incidents) for o in harmed), default=0)}",
        f"* more than 5 steps behind the best rule on the loss: {_listed(behind)}",
        f"* more than 5 steps behind the best of these and a rule on plateaus of 100 steps: {len(behind_plateau)}; "
        f"that rule also fires in {num_plateaus} of {len(healthy)} healthy runs",
        f"* false alerts: {sum(len(o.verdict.false) for o in outcomes)} in {len(outcomes)} runs",
        f"* healthy runs that zoomed in: {_listed(zoomed)} of {len(healthy)}",
        _replays(outcomes),
        f"* overhead in CPU time: {_shares(outcomes)}; of runs that did not zoom in: "
        f"{_shares([o for o in outcomes if o.status.zooms is None])}",
    ]


def _healthy_summary(outcomes: Sequence[Outcome]) -> list[str]:
    return [
        f"* {len(outcomes)} runs, {sum(o.verdict.num_steps for o in outcomes):,} steps",
        f"* runs with an alert: {_listed([o.verdict.trial.name for o in outcomes if o.verdict.alarms])}; with a spike "
        f"by rules on the loss: {_listed([o.verdict.trial.name for o in outcomes if o.verdict.accident < NEVER])}",
        f"* runs that zoomed in: {_listed([o.verdict.trial.name for o in outcomes if o.status.zooms is not None])}",
        _replays(outcomes),
        f"* overhead in CPU time: {_shares(outcomes)}",
        f"* runs with an overhead in CPU time above {MAX_OVERHEAD:.1%}: {sum(o.overhead > MAX_OVERHEAD for o in outcomes)}",
    ]


def _replays(outcomes: Sequence[Outcome]) -> str:
    others = [o.verdict.trial.name for o in outcomes if not o.is_repeatable]
    return f"* runs whose replay gives other alerts: {_listed(others)}"


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "0"


def _shares(outcomes: Sequence[Outcome]) -> str:
    ratios = [o.overhead for o in outcomes]
    return f"{_median(ratios):.2%} (median), {max(ratios, default=math.nan):.2%} (highest)"


def _median(values: Iterable[float]) -> float:
    return statistics.median([*values, *()] or [math.nan])
