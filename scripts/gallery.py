"""Draw the pictures of docs/gallery.md: failures beside healthy runs that look alike.

    python scripts/gallery.py [NAME ...]

The runs are recorded in `tests/data/traces`. Axes: S samples, L layers of the metric.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from tsemon_answers.incidents import Verdict
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.services.replay.replaying import Replayed, replay
from tsemon_server.services.replay.traces import Trace

ROOT = Path(__file__).parent.parent
IMAGES, TRACES = ROOT / "docs/images", ROOT / "tests/data/traces"
LOSS, ALERT, ZERO = "#0b6e99", "#c1272d", "#d0d0d0"


@dataclass(frozen=True)
class Pair:
    """A failing run and a healthy one, with the metric in which they differ."""

    name: str
    """The picture is `docs/images/gallery-NAME.png`."""
    failing: str
    healthy: str
    metric: str
    titles: tuple[str, str]
    colors: Normalize
    """Range of the metric."""


PAIRS = (
    Pair("tse", "tse_vit24", "h_vit48_pre", "token_diversity",
         ("post-norm, 24 blocks", "pre-norm, 48 blocks"), LogNorm(1e-9, 1)),
    Pair("entropy", "ent_qk20", "h_copy", "attention_entropy",
         ("large query and key weights", "induction heads"), Normalize(0, 1)),
    Pair("rank", "rank_ssl", "ssl", "batch_rank",
         ("embeddings collapse", "they do not"), Normalize(0, 45)),
    Pair("norm", "norm_wdneg", "h_smallinit", "param_norm",
         ("weight decay with the wrong sign", "small weights at the start"), LogNorm(10, 1500)),
    Pair("dead-units", "dead_relu", "h_massdim", "dead_units",
         ("all units die at step 60", "one very large hidden dimension"), Normalize(0, 1)),
    Pair("dead-block", "dead_frozen", "h_frozenlow", "update_norm",
         ("the optimizer does not have the blocks", "two blocks frozen on purpose"), LogNorm(1e-3, 1)),
    Pair("rate", "div_lr", "h_restarts", "update_norm",
         ("the learning rate jumps at step 150", "warm restarts"), LogNorm(2e-3, 4)),
    Pair("labels", "div_labels", "h_shift", "grad_norm",
         ("labels of other inputs from step 150 on", "other text from step 150 on"), LogNorm(1e-2, 2)),
)  # fmt: skip


class Recorded:
    """A recorded run: its losses, its metrics, and its incidents."""

    def __init__(self, name: str) -> None:
        self.path = TRACES / f"{name}-s0.jsonl.gz"
        with gzip.open(self.path, "rt") as lines:
            self._entries = [json.loads(line) for line in lines]
        self.losses: list[float] = next(entry["loss"] for entry in self._entries if entry["t"] == "loss")

    def metric(self, name: str) -> tuple[list[int], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
        """The steps of the samples, and the values (S, L)."""
        frames = [entry for entry in self._entries if entry["t"] == "frame" and name in entry["layers"]]
        return [frame["step"] for frame in frames], np.array([frame["layers"][name] for frame in frames], float)

    def replayed(self) -> Replayed:
        return replay(Trace(self.path), Evaluator(PACK))


def draw(pair: Pair, path: Path) -> None:
    figure = Figure(figsize=(9, 4.2), dpi=110, facecolor="white", layout="constrained")
    maps, curves = figure.subplots(2, 2, sharex="col", height_ratios=(1.3, 1))
    for column, name in enumerate((pair.failing, pair.healthy)):
        run = Recorded(name)
        image = _heat_map(maps[column], run, pair)
        maps[column].set_title(f"{'Healthy' if column else 'Failing'}: {pair.titles[column]}", size=10)
        curves[column].plot(run.losses, color=LOSS, linewidth=0.9)
        curves[column].set(xlabel="step", ylabel="loss")
        incidents = run.replayed().incidents
        for axis in (maps[column], curves[column]) if incidents else ():
            axis.axvline(incidents[0].step, color=ALERT, linewidth=1.2, linestyle="--")
        curves[column].set_title(_said(incidents), size=9, color=ALERT if incidents else "black", loc="left")
    figure.colorbar(image, ax=[*maps], label=pair.metric, pad=0.01, aspect=12)
    figure.savefig(path, metadata={"Software": None})


def _said(incidents: tuple[Verdict, ...] | list[Verdict]) -> str:
    return f"incident at step {incidents[0].step}: {incidents[0].rule}" if incidents else "no incident"


def _heat_map(axis: Axes, run: Recorded, pair: Pair) -> AxesImage:
    steps, values_SL = run.metric(pair.metric)
    has_input = values_SL.shape[1] > len(run.metric("param_norm")[1][0])
    first = -1.5 if has_input else -0.5
    axis.set(ylabel="block", facecolor=ZERO)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter(lambda block, _: "input" if block == -1 else f"{block:.0f}")
    return axis.imshow(
        values_SL.T,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        norm=pair.colors,
        extent=(0, steps[-1] + steps[1] - steps[0], first, first + values_SL.shape[1]),
    )


def main(*names: str) -> None:
    for pair in PAIRS:
        if not names or pair.name in names:
            draw(pair, IMAGES / f"gallery-{pair.name}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
