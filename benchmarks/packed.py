"""Does a training raise the same alerts if its documents are packed into rows?

Trains small BERT- and GPT-like models, healthy and with defects, on the same documents as a padded batch and packed into
rows in several ways. Each run goes through `tsemon.attach` to its spool, and the built-in rules are replayed.

    python benchmarks/packed.py [--folder FOLDER] [--only NAME ...] [--steps N] [--layouts LAYOUT ...]
                                [--page FILE]

Trainings in FOLDER are not repeated. All of them take forty minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from detection import record_missing
from trials.packed import LAYOUTS, TRIALS, laid_out, layouts
from trials.recording import Trial, read_losses
from trials.report import conditions, filled

from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.replay.replaying import Fired, replay
from tsemon_server.services.replay.sources import find_sources

BATCH, *PACKED = LAYOUTS
SAME_LOSS = 1e-4
"""Maximum relative difference between the losses of equal trainings. Some defects make a training chaotic: a rounding error
of float64 grows until the losses differ."""


class Alert(NamedTuple):
    """The parts of an alert that are compared."""

    firing_step: int
    rule: str
    severity: str
    resolved_step: int | None
    layers: tuple[int | None, ...]
    """The lowest and the highest layer of each metric that the rule reads."""


@dataclass(frozen=True)
class Run:
    """One training in one layout."""

    alerts: Sequence[Alert]
    """In the order of steps."""
    loss: Sequence[float]

    def parts_from(self, other: Run) -> float:
        """The first step at which the losses differ."""
        steps = min(len(self.loss), len(other.loss))
        ours, theirs = torch.tensor(self.loss[:steps]), torch.tensor(other.loss[:steps])
        is_far = ~torch.isclose(ours, theirs, rtol=SAME_LOSS, atol=0.0, equal_nan=True)
        return int(is_far.int().argmax()) if is_far.any() else math.inf

    def until(self, end: float) -> list[Alert]:
        """The alerts that fired before a step, without later events."""
        return [
            alert if (alert.resolved_step or 0) < end else alert._replace(resolved_step=None)
            for alert in self.alerts
            if alert.firing_step < end
        ]


Runs = Mapping[str, Run]
"""By layout."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the trainings here, and use the ones from before")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings")
    parser.add_argument("--steps", type=int, help="end each training after this many steps")
    parser.add_argument("--layouts", nargs="+", choices=PACKED, default=PACKED, help="beside the batch")
    parser.add_argument("--page", type=Path, help="write the tables between the marks of this page: docs/detection.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trials = [
        replace(trial, steps=options.steps or trial.steps)
        for trial in TRIALS
        if options.only is None or trial.name in options.only
    ]
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tsemon-")))
        found = {trial: runs_of(trial, options.layouts, folder) for trial in trials}
    num_trainings = sum(map(len, found.values()))
    tables = {
        "conditions of packed": [conditions(num_trainings).strip()],
        "families of packed": list(families(found)),
        "packed": list(each(found)),
    }
    for lines in tables.values():
        print("\n".join(lines) + "\n")
    if options.page is not None:
        options.page.write_text(filled(options.page.read_text(), tables))


def runs_of(trial: Trial, packed: Sequence[str], folder: Path) -> Runs:
    chosen = [layout for layout in layouts(trial) if layout in (BATCH, *packed)]
    return {layout: run(laid_out(trial, layout), folder) for layout in chosen}


def run(trial: Trial, folder: Path) -> Run:
    own = folder / trial.name
    record_missing([trial], own)
    (source,) = find_sources([own / "spools"])
    alerts = (
        Alert(fired.firing_step, fired.rule, fired.severity, fired.resolved_step, layers_of(fired))
        for fired in replay(source.open(), Evaluator(PACK)).alerts
    )
    return Run(sorted(alerts, key=lambda alert: (alert.firing_step, alert.rule)), read_losses(own, trial.name).loss)


def layers_of(alert: Fired) -> tuple[int | None, ...]:
    profiles = alert.evidence["layers"].values()
    return tuple(profile.get(end, {}).get("layer") for profile in profiles for end in ("lowest", "highest"))


def families(found: Mapping[Trial, Runs]) -> Iterator[str]:
    alarmed = "with a warning or critical alert, batch and packed"
    same = " | ".join(f"same in {layout}" for layout in PACKED)
    yield f"| training family | trainings | {alarmed} | alerts of the batch | {same} |"
    yield "|---" * (4 + len(PACKED)) + "|"
    for family in dict.fromkeys(trial.family for trial in found):
        group = [runs for trial, runs in found.items() if trial.family == family]
        loud = [[any(a.severity != "info" for a in run.alerts) for run in runs.values()] for runs in group]
        num_alerts = sum(len(runs[BATCH].alerts) for runs in group)
        figures = [f"{sum(each[0] for each in loud)} and {sum(any(each[1:]) for each in loud)}", f"{num_alerts}"]
        yield f"| {family} | {len(group)} | {' | '.join(figures + [_num_same(group, layout) for layout in PACKED])} |"


def _num_same(group: Sequence[Runs], layout: str) -> str:
    compared = [_compared(runs[BATCH], runs.get(layout)) for runs in group if layout in runs]
    return f"{sum(words.startswith('same') for words in compared)} of {len(compared)}"


def each(found: Mapping[Trial, Runs]) -> Iterator[str]:
    """A row for each training."""
    yield "| training | defect | alerts of the batch | " + " | ".join(PACKED) + " |"
    yield "|---" * (3 + len(PACKED)) + "|"
    for trial, runs in found.items():
        packed = " | ".join(_compared(runs[BATCH], runs.get(layout)) for layout in PACKED)
        yield f"| {trial.name} | {trial.about} | {_in_words(runs[BATCH].alerts)} | {packed} |"


def _compared(batch: Run, packed: Run | None) -> str:
    if packed is None:
        return "-"
    end = batch.parts_from(packed)
    ours, theirs = ({alert[:4]: alert for alert in run.until(end)} for run in (batch, packed))
    words = [f"without {_in_words([ours[key] for key in ours if key not in theirs])}"] if ours.keys() - theirs else []
    words += [f"also {_in_words([theirs[key] for key in theirs if key not in ours])}"] if theirs.keys() - ours else []
    if not words:
        words = ["same"]
        if others := [ours[key] for key in ours if ours[key].layers != theirs[key].layers]:
            words.append(f"other layers in {', '.join(alert.rule for alert in others)}")
    if end < len(batch.loss):
        words.append(f"to step {end - 1:.0f}")
    return ", ".join(words)


def _in_words(alerts: Sequence[Alert]) -> str:
    return ", ".join(f"{alert.rule} at {alert.firing_step}" for alert in alerts) or "none"


if __name__ == "__main__":
    main()
