"""Draw docs/images/escalation.png: the failing run of the demo beside its healthy control.

    python scripts/escalation_picture.py

The runs are recorded in `tests/data/traces`. Axes: S samples, L layers (the input, then the output of each block).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.replay.traces import Trace

ROOT = Path(__file__).parent.parent
PICTURE, TRACES = ROOT / "docs/images/escalation.png", ROOT / "tests/data/traces"
RULE = "token-similarity-escalation"
FAILING, CONTROL, HEALTHY, INK = "#b4532a", "#0b6e99", "#8fc7a3", "#1c2330"
LOWEST = -9
"""Decades of token diversity; below them is the noise of float32."""


class Recording:
    """A recorded run: its losses, and the token diversity of its samples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with gzip.open(path, "rt") as lines:
            entries = [json.loads(line) for line in lines]
        self.is_healthy = not entries[0]["failing"] and not entries[0]["gray"]
        self.losses = next((entry["loss"] for entry in entries if entry["t"] == "loss"), [])
        frames = [entry for entry in entries if entry["t"] == "frame" and "token_diversity" in entry["layers"]]
        self.steps = [frame["step"] for frame in frames]
        self.diversity_SL = np.array([frame["layers"]["token_diversity"] for frame in frames], float)

    def firing_step(self) -> int:
        """The step at which the rule fires."""
        evaluator = Evaluator([rule for rule in PACK if rule.name == RULE])
        (run,) = Trace(self.path).attempts()
        (events,) = evaluator.read([(evaluator.start(), [*run.views])])
        return next(event.firing_step for event in events if event.kind == "firing" and event.firing_step is not None)


def pair() -> tuple[Recording, Recording]:
    """The failing run and its control."""
    failing, control = (Recording(TRACES / f"digits-{name}-s0.jsonl.gz") for name in ("post-norm", "de-escalated"))
    return failing, control


def healthy_range() -> tuple[float, float]:
    """The lowest and highest token diversity after the last block in all healthy recorded runs."""

    def last_blocks() -> Iterator[float]:
        for run in map(Recording, TRACES.glob("*.jsonl.gz")):
            if run.is_healthy and run.steps:
                yield from run.diversity_SL[:, -1].tolist()

    values = list(last_blocks())
    return min(values), max(values)


def draw(path: Path) -> None:
    failing, control = pair()
    step, healthy = failing.firing_step(), healthy_range()
    figure = Figure(figsize=(9, 5.4), dpi=160, facecolor="white", layout="constrained")
    (left, right), (diversity, loss) = figure.subplots(2, 2, height_ratios=(1.25, 1))
    _heat_map(left, failing, f"Failing: post-norm, {failing.diversity_SL.shape[1] - 1} blocks")
    image = _heat_map(right, control, "Healthy control: same seed and data, with de-escalation")
    bar = figure.colorbar(image, ax=[left, right], label="token diversity", pad=0.01, aspect=16)
    decades = range(LOWEST, 1, 3)
    bar.set_ticks(decades, labels=[f"$10^{{{decade}}}$" for decade in decades])
    diversity.axhspan(*healthy, color=HEALTHY, alpha=0.45, linewidth=0, label="range of healthy runs")
    for run, color, name in ((failing, FAILING, "failing"), (control, CONTROL, "healthy control")):
        diversity.semilogy(run.steps, run.diversity_SL[:, -1], color=color, label=name)
        loss.plot(run.losses, color=color, linewidth=0.9)
    for axis, title in ((diversity, "Token diversity of the last block"), (loss, "Training loss")):
        axis.axvline(step, color=INK, linewidth=0.9, linestyle="--", label=f"alert at step {step}")
        axis.set(title=title, xlabel="step", xlim=left.get_xlim())
    diversity.legend(fontsize=8, loc="center right", bbox_to_anchor=(1.0, 0.42))
    for axis in figure.axes:
        axis.title.set_size(10)
    figure.savefig(path, metadata={"Software": None})


def _heat_map(axis: Axes, run: Recording, title: str) -> AxesImage:
    axis.set(title=title, xlabel="step", ylabel="block")
    num_layers = run.diversity_SL.shape[1]
    end = run.steps[-1] + run.steps[1] - run.steps[0]
    return axis.imshow(
        np.log10(run.diversity_SL.T),
        origin="lower",
        aspect="auto",
        vmin=LOWEST,
        vmax=0,
        extent=(0, end, -0.5, num_layers - 0.5),
    )


if __name__ == "__main__":
    draw(PICTURE)
