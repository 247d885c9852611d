"""A row for each failing run: when the harm began, when its loss told, and when the first alarm came."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trials.judging import NEVER, Verdict

INK, PALE, GREY = "#1c2330", "#dfe3ea", "#8a93a3"
OURS, LOSS = "#0b6e99", "#b4532a"


def draw(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Write an SVG on white, which both themes of a reader show alike. What never came is not drawn."""
    figure = Figure(figsize=(8.6, 0.2 * len(verdicts) + 1.2), facecolor="white")
    axis = figure.subplots()
    for row, verdict in enumerate(verdicts):
        axis.plot(
            [verdict.onset, verdict.num_steps], [row, row], color=PALE, linewidth=5, solid_capstyle="butt", zorder=1
        )
        told = verdict.first
        if told is not None:
            over = min(verdict.standstill, verdict.num_steps)
            colour = OURS if over >= told.step else LOSS
            axis.plot([told.step, over], [row, row], color=colour, linewidth=1.2, zorder=2)
    _dots(axis, [v.onset for v in verdicts], "|", INK, "onset in the loss, or the defect")
    _dots(axis, [v.accident for v in verdicts], "s", LOSS, "loss: not finite, spike or 6 sigma")
    _dots(
        axis,
        [v.standstill if v.standstill < v.accident else NEVER for v in verdicts],
        "D",
        GREY,
        "loss: plateau of 100 steps",
    )
    _dots(axis, [v.first.step if v.first else NEVER for v in verdicts], "o", OURS, "first alarm of tsemon")
    names = [f"{v.trial.name}   {v.trial.family}" for v in verdicts]
    axis.set_yticks(range(len(verdicts)), names, fontsize=7)
    axis.set_ylim(len(verdicts) - 0.3, -0.7)
    axis.set(xlabel="step")
    axis.grid(axis="x", color=PALE)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2, frameon=False, fontsize=8)
    figure.tight_layout()
    # The same figures are the same file, and letters stay letters.
    with rc_context({"svg.hashsalt": "tsemon", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _dots(axis: Axes, steps: Sequence[float], marker: str, colour: str, label: str) -> None:
    seen = [(step, row) for row, step in enumerate(steps) if step < NEVER]
    axis.plot([s for s, _ in seen], [r for _, r in seen], marker, color=colour, markersize=5, label=label, zorder=3)
