"""Which failures do the built-in rules detect at default settings, how late, and at what cost?

Trains small models that fail in known ways while `tsemon serve` evaluates them in a process of its own, with the cadence
that `attach` has by default. Alerts are read over REST when the run has ended.

    python benchmarks/live.py [--seeds N] [--only NAME ...] [--no-zooms] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from detection import alarms_of, service
from trials.default import FAILING, SEEDS, TWINS, seeded
from trials.judging import NEVER, Verdict, judge
from trials.recording import Losses, Trial, read_losses, record

from tsemon.schedule import Cadence
from tsemon.status import Status
from tsemon_client import Client


@dataclass(frozen=True)
class Outcome:
    """A training that was watched."""

    verdict: Verdict
    status: Status
    num_samples: int

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

    def __str__(self) -> str:
        trial, first, zooms = self.verdict.trial, self.verdict.first, self.status.zooms
        cells = (
            trial.name,
            trial.family,
            str(self.verdict.num_steps),
            str(self.num_samples),
            "-" if zooms is None else f"{zooms.num}, from {zooms.step} on: {zooms.reason}",
            f"{self.status.overhead_ratio:.2%}",
            str(self.verdict.onset),
            str(self.verdict.accident),
            "-" if first is None else f"{first.step} {first.rule}",
            f"{self.delay:+.0f}" if self.verdict.is_harmed else "not harmed",
            str(len(self.verdict.false)),
        )
        return f"| {' | '.join(cells)} |"


HEAD = "| run | family | steps | samples | zoomed in | overhead | onset | loss rules | first alert | delay | false |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds of each training")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings and their control runs")
    parser.add_argument("--no-zooms", action="store_true", help="never sample more often at a sign of trouble")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.no_zooms:
        Cadence.zoom_in = lambda self: False  # type: ignore[method-assign]
    trials = chosen(options.only)
    print(f"{HEAD}\n|{'---|' * HEAD.count(' | ')}---|", flush=True)
    outcomes = []
    for outcome in watched(seeded(trials, SEEDS[: options.seeds])):
        print(outcome, flush=True)
        outcomes.append(outcome)
    print(f"\n{summary(outcomes)}")


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
            status = record(trial, Path(name), url)
            losses[trial.name] = read_losses(Path(name), trial.name)
            twin = losses[trial.twin].loss if trial.twin else None
            verdict = judge(trial, losses[trial.name].loss, twin, alarms_of(client, trial.name))
            yield Outcome(verdict, status, status.delivery.num_sent)


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


def _median(values: Iterable[float]) -> float:
    return statistics.median([*values, *()] or [math.nan])


if __name__ == "__main__":
    main()
