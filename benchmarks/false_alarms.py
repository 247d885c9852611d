"""Do the built-in rules leave models alone that do nothing odd?

Hugging Face models as they start, the reference models in several depths and widths for their first 60 steps, and a tiny
model for 20,000 steps, through the monitor, a service in a process of its own, and REST.

    python benchmarks/false_alarms.py [--folder FOLDER] [--only NAME ...]

What was trained into FOLDER is not trained again. The trainings take ten minutes of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from detection import judged, record_missing
from trials.judging import Verdict
from trials.quiet import LONG, QUIET, REFERENCE, UNTRAINED
from trials.recording import num_samples
from trials.report import conditions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the trainings here, and use what is here already")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trials = [trial for trial in QUIET if options.only is None or trial.name in options.only]
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tsemon-")))
        record_missing(trials, folder)
        verdicts = judged(trials, folder)
        counts = {trial.name: num_samples(folder, trial.name) for trial in trials}
    print(conditions(len(verdicts)))
    print("| models | runs | steps | samples | alerts | per thousand steps |")
    print("|---|---|---|---|---|---|")
    for title, group in (
        ("Hugging Face, as they start", UNTRAINED),
        ("reference models, first steps", REFERENCE),
        ("a tiny model, default cadence", (LONG,)),
    ):
        _print_row(title, [v for v in verdicts if v.trial in group], counts)
    for verdict in verdicts:
        for alarm in verdict.alarms:
            print(f"alarm: {verdict.trial.name}: {alarm.rule} at {alarm.step}")


def _print_row(title: str, verdicts: Sequence[Verdict], counts: Mapping[str, int]) -> None:
    num_steps = sum(verdict.num_steps for verdict in verdicts)
    num_alarms = sum(len(verdict.alarms) for verdict in verdicts)
    num_samples = sum(counts[verdict.trial.name] for verdict in verdicts)
    if verdicts:
        figures = (
            f"{len(verdicts)} | {num_steps:,} | {num_samples:,} | {num_alarms} | {1000 * num_alarms / num_steps:.3f}"
        )
        print(f"| {title} | {figures} |")


if __name__ == "__main__":
    main()
