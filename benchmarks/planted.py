"""Do incidents name the block and the sub-step that are damaged, at default settings?

Trains small models with a damaged sub-step in a known block, while `tsemon serve` evaluates them in a process of its own.
The incident is read over REST when the run has ended.

    python benchmarks/planted.py [--blocks N] [--seeds SEED ...] [--only NAME ...] [--page FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from detection import service
from trials.judging import steps_behind
from trials.planted import EVENT, Plant, plants
from trials.recording import PROJECT, read_losses, record
from trials.report import conditions, filled

from tsemon_answers.incidents import IncidentDetail
from tsemon_client import Client

SEEDS = 81, 82
NEAR = 2
HEAD = "| run | damaged | incident at | verdict | blocks | named | factor | right |"


@dataclass(frozen=True)
class Found:
    """A training, and the first incident after the damage."""

    plant: Plant
    incident: IncidentDetail | None
    num_false: int
    """Incidents before the damage."""
    is_harmed: bool
    """Whether the loss was ever behind the undamaged training."""

    @property
    def is_block_right(self) -> bool:
        """Whether the block that the incident names is within two of the damaged one."""
        return self.block is not None and abs(self.block - self.plant.block) <= NEAR

    @property
    def block(self) -> int | None:
        """The block of the sub-step, or the first block of the verdict."""
        if self.incident is None:
            return None
        blocks = self.incident.blocks
        named = self.incident.within.block
        return named if named is not None else None if blocks is None else blocks[0]

    @property
    def is_verdict_near(self) -> bool:
        """The same for the first block of the verdict alone."""
        blocks = None if self.incident is None else self.incident.blocks
        return blocks is not None and abs(blocks[0] - self.plant.block) <= NEAR

    @property
    def is_sub_step_right(self) -> bool:
        within = None if self.incident is None else self.incident.within
        return within is not None and within.sub_step == self.plant.sub_step and self.is_block_right

    def __str__(self) -> str:
        plant, one = self.plant, self.incident
        cells = [plant.trial.name, f"{plant.sub_step} of block {plant.block}"]
        if one is None:
            cells += ["-"] * 6
        else:
            within = one.within
            blocks = "-" if one.blocks is None else "{} to {}".format(*one.blocks)
            named = within.text if within.sub_step is None else f"{within.sub_step} of block {within.block}"
            factor = "-" if within.factor is None else f"{within.factor:.2g}"
            right = [
                name
                for name, is_right in (("block", self.is_block_right), ("sub-step", self.is_sub_step_right))
                if is_right
            ]
            cells += [f"+{one.step - EVENT}", one.rule, blocks, named, factor, ", ".join(right) or "no"]
        return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6, metavar="N", help="number of blocks of the models")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, metavar="SEED", help="seeds of each training")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings")
    parser.add_argument("--page", type=Path, help="write the figures between the marks of this page: docs/detection.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [p for p in plants(options.seeds, options.blocks) if options.only is None or p.trial.name in options.only]
    print(f"{conditions(len(chosen))}\n{HEAD}\n|{'---|' * HEAD.count(' | ')}---|", flush=True)
    found = []
    for one in watched(chosen):
        print(one, flush=True)
        found.append(one)
    place = f"planted {options.blocks}"
    tables = {f"{place} conditions": [conditions(len(found)).strip()], f"{place} summary": summary(found)}
    print("\n" + "\n\n".join("\n".join(lines) for lines in tables.values()))
    if options.page is not None:
        options.page.write_text(filled(options.page.read_text(), tables))


def watched(chosen: Sequence[Plant]) -> Iterator[Found]:
    with (
        service() as url,
        tempfile.TemporaryDirectory(prefix="tsemon-") as folder,
        contextlib.closing(Client(url)) as client,
    ):
        controls: dict[str, list[float]] = {}
        for plant in chosen:
            if plant.control.name not in controls:
                record(plant.control, Path(folder))
                controls[plant.control.name] = read_losses(Path(folder), plant.control.name).loss
            record(plant.trial, Path(folder), url)
            loss = read_losses(Path(folder), plant.trial.name).loss
            run_id = client.find_run(plant.trial.name, project=PROJECT).run_id
            incidents = [*reversed([*client.incidents(run_id=run_id)])]
            after = [one for one in incidents if one.step >= EVENT]
            detail = client.incident(after[0].incident_id) if after else None
            is_harmed = bool(steps_behind(loss, controls[plant.control.name]))
            yield Found(plant, detail, len(incidents) - len(after), is_harmed)


def summary(found: Sequence[Found]) -> list[str]:
    told = [one for one in found if one.incident is not None]
    missed = [one for one in found if one.incident is None and one.is_harmed]
    delays = sorted(one.incident.step - EVENT for one in told if one.incident is not None)
    decided = [one for one in told if one.incident is not None and one.incident.within.sub_step is not None]
    num_due = len(told) + len(missed)
    num_all = max(len(found), 1)

    def share(are_right: Iterable[bool]) -> str:
        num_right = sum(are_right)
        return (
            f"{num_right} of {num_due} ({num_right / max(num_due, 1):.0%}; {num_right / num_all:.0%} of all {num_all})"
        )

    names = f" ({', '.join(one.plant.trial.name for one in missed)})" if missed else ""
    return [
        f"* {len(told)} of {len(found)} raised an incident"
        + (f", {delays[len(delays) // 2]} steps after the damage (median)" if delays else ""),
        f"* of the other {len(found) - len(told)}, {len(missed)} were ever behind the undamaged training{names}",
        f"* the damaged block: {share(one.block == one.plant.block for one in told)}",
        f"* block within {NEAR}: {share(one.is_block_right for one in told)}; the first block of the verdict "
        f"alone: {sum(one.is_verdict_near for one in told)}",
        f"* sub-step right: {share(one.is_sub_step_right for one in told)}; undecided: {len(told) - len(decided)}",
        f"* incidents before the damage: {sum(one.num_false for one in found)}",
    ]


if __name__ == "__main__":
    main()
