"""How all figures look: built without pyplot, so that nothing global is drawn on."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's, which colour-blind readers can tell apart."""


def panels(*titles: str, x: str = "") -> tuple[Figure, list[Axes]]:
    """A row of panels with these titles, and `x` as the label of their horizontal axes."""
    figure = Figure(figsize=(4.2 * len(titles), 3.4), layout="constrained")
    axes = [figure.add_subplot(1, len(titles), number) for number in range(1, len(titles) + 1)]
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(x)
        panel.set_prop_cycle(color=COLOURS)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend_beside(figure: Figure, panel: Axes) -> None:
    """The panel's legend to the right of all panels, where it hides nothing."""
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right center", fontsize=8)
