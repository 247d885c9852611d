"""How figures grow with the length of a run, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

INK, PALE = "#1c2330", "#dfe3ea"
COLOURS = {"SQLite": "#0b6e99", "PostgreSQL": "#b4532a"}

Curves = Mapping[str, Mapping[int, float]]
"""Per engine the figure at each number of steps."""


@dataclass(frozen=True)
class Panel:
    """One kind of figure on both engines."""

    title: str
    unit: str
    curves: Curves
    target: float | None = None


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """Write an SVG on white, which both themes of a reader show alike, with figures from zero up."""
    figure = Figure(figsize=(3.6 * len(panels), 3.2), facecolor="white")
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for engine, points in panel.curves.items():
            axis.plot(list(points), list(points.values()), "o-", color=COLOURS[engine], label=engine)
        if panel.target is not None:
            axis.axhline(panel.target, color=INK, linewidth=1, linestyle="--")
            axis.annotate("target", (0.02, panel.target), xycoords=("axes fraction", "data"), va="bottom")
        axis.set(title=panel.title, xlabel="steps", ylabel=panel.unit, xscale="log")
        axis.set_ylim(bottom=0)
        axis.grid(color=PALE)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    # The same figures are the same file, and letters stay letters.
    with rc_context({"svg.hashsalt": "tsemon", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
