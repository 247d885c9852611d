"""Which failures do the built-in rules detect at default settings, how late, and at what cost?

Trains small models that fail in known ways while `tsemon serve` evaluates them in a process of its own, with the cadence
that `attach` has by default. Alerts are read over REST when the run has ended.

    python benchmarks/live.py [--seeds N] [--steps N] [--only NAME ...] [--no-zooms]
    python benchmarks/live.py --healthy [--steps N] [--only NAME ...]

The second command trains 30 healthy models for 5,000 steps each.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from detection import alarms_of, service
from trials.default import FAILING, SEEDS, TWINS, seeded
from trials.healthy import HEALTHY
from trials.judging import NEVER, Verdict, judge
from trials.recording import Losses, Trial, read_losses, record
from trials.report import conditions

from tsemon.schedule import Cadence
from tsemon.status import Status
from tsemon_client import Client


@dataclass(frozen=True)
class Outcome:
    """A training that was watched."""

    verdict: Verdict
    status: Status
    losses: Losses
    trained_s: float

    @property
    def num_samples(self) -> int:
        return self.status.delivery.num_sent

    @property
    def delay(self) -> float:
        """Steps from the onset of the harm to the first alert; negative if the alert comes first."""
        first = self.verdict.first
        return math.nan if first is None else first.step - self.verdict.onset

    @property
    def behind_loss_rules(self) -> float:
        """Steps by which the first alert is later than the first rule on the loss."""
        first = self.verdict.first
        return (NEVER if first is None else first.step) - self.verdict.accident

    @property
    def step_ms(self) -> float:
        """Wall time of the training over its number of steps, including evaluations and earlier training."""
        return 1e3 * self.trained_s / self.verdict.num_steps

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
            f"{self.status.overhead_ratio:.2%}",
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
            f"{self.status.overhead_ratio:.2%}",
            ", ".join(f"{alarm.rule} at {alarm.step}" for alarm in self.verdict.alarms) or "-",
        )
        return f"| {' | '.join(cells)} |"


MAX_OVERHEAD = 0.012
"""A healthy run of 5,000 steps should cost no more than this fraction of wall time."""
HEAD = "| run | family | steps | samples | zoomed in | overhead | onset | loss rules | first alert | delay | false |"
HEALTHY_HEAD = "| run | setting | steps | step, ms | loss | samples | zoomed in | overhead | alerts |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds of each training")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings and their control runs")
    parser.add_argument("--no-zooms", action="store_true", help="never sample more often at a sign of trouble")
    parser.add_argument("--steps", type=int, help="steps of each training; a defect sets in halfway, as in longer ones")
    parser.add_argument("--healthy", action="store_true", help="long healthy trainings, and no others")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.no_zooms:
        Cadence.zoom_in = lambda self: False  # type: ignore[method-assign]
    trials = healthy(options.only) if options.healthy else tuple(seeded(chosen(options.only), SEEDS[: options.seeds]))
    if options.steps:
        trials = tuple(trial.lasting(options.steps) for trial in trials)
    head = HEALTHY_HEAD if options.healthy else HEAD
    print(f"{conditions(len(trials))}\n{head}\n|{'---|' * head.count(' | ')}---|", flush=True)
    outcomes = []
    for outcome in watched(trials):
        print(outcome.healthy_row if options.healthy else outcome, flush=True)
        outcomes.append(outcome)
    print(f"\n{healthy_summary(outcomes) if options.healthy else summary(outcomes)}")


def healthy(names: Sequence[str] | None) -> tuple[Trial, ...]:
    return tuple(trial for trial in HEALTHY if names is None or trial.name in names)


def chosen(names: Sequence[str] | None) -> tuple[Trial, ...]:
    failing = tuple(trial for trial in FAILING if names is None or trial.name in names)
    twins = {trial.twin for trial in failing} | {*(names or (trial.name for trial in TWINS))}
    return tuple(trial for trial in TWINS if trial.name in twins) + failing


def watched(trials: Iterable[Trial]) -> Iterator[Outcome]:
    """Run the trainings in order. A control run comes before the failing runs that are compared with it."""
    losses: dict[str, Losses] = {}
    with (
        service() as url,
        tempfile.TemporaryDirectory(prefix="tsemon-") as name,
        contextlib.closing(Client(url)) as client,
    ):
        for trial in trials:
            start = time.perf_counter()
            status = record(trial, Path(name), url)
            trained_s = time.perf_counter() - start
            losses[trial.name] = read_losses(Path(name), trial.name)
            twin = losses[trial.twin].loss if trial.twin else None
            verdict = judge(trial, losses[trial.name].loss, twin, alarms_of(client, trial.name))
            yield Outcome(verdict, status, losses[trial.name], trained_s)


def summary(outcomes: Sequence[Outcome]) -> str:
    harmed = [o for o in outcomes if o.verdict.is_harmed]
    found = [o for o in harmed if o.verdict.first is not None]
    healthy = [o for o in outcomes if not o.verdict.trial.is_failing]
    behind = [o for o in harmed if o.verdict.accident < NEVER and o.behind_loss_rules > 5]
    lines = [
        f"{len(found)} of {len(harmed)} harmed runs found, delay {_median(o.delay for o in found):.0f} steps (median)",
        f"more than 5 steps behind the best rule on the loss: {len(behind)}: "
        + ", ".join(f"{o.verdict.trial.name} ({o.behind_loss_rules:+.0f})" for o in behind),
        f"false alerts: {sum(len(o.verdict.false) for o in outcomes)} in {len(outcomes)} runs",
        f"healthy runs: {len(healthy)}, {sum(o.status.zooms is not None for o in healthy)} of them zoomed in",
        f"overhead: {_median(o.status.overhead_ratio for o in outcomes):.2%} (median), "
        f"{max(o.status.overhead_ratio for o in outcomes):.2%} (highest)",
    ]
    return "\n".join(lines)


def healthy_summary(outcomes: Sequence[Outcome]) -> str:
    alerted = [o.verdict.trial.name for o in outcomes if o.verdict.alarms]
    zoomed = [o.verdict.trial.name for o in outcomes if o.status.zooms is not None]
    expensive = [o.verdict.trial.name for o in outcomes if o.status.overhead_ratio > MAX_OVERHEAD]
    ratios = [o.status.overhead_ratio for o in outcomes]
    lines = [
        f"{len(outcomes)} runs, {sum(o.verdict.num_steps for o in outcomes):,} steps",
        f"runs with an alert: {len(alerted)} {', '.join(alerted)}",
        f"runs that zoomed in: {len(zoomed)} {', '.join(zoomed)}",
        f"overhead: {_median(ratios):.2%} (median), {max(ratios):.2%} (highest)",
        f"runs with an overhead above {MAX_OVERHEAD:.1%}: {len(expensive)} {', '.join(expensive)}",
    ]
    return "\n".join(map(str.rstrip, lines))


def _median(values: Iterable[float]) -> float:
    return statistics.median([*values, *()] or [math.nan])


if __name__ == "__main__":
    main()
