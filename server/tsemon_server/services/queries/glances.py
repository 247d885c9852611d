"""A run at a glance: where its loss goes, and how the worst of its layers does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsemon.stacks import Stacks
from tsemon_answers.runs import Glance, Glances, GlancesQuery, LossLine, Worst
from tsemon_server.filling import filled
from tsemon_server.services.queries.reduce import bucketed
from tsemon_server.services.queries.service import middles, nullable
from tsemon_server.store import Store
from tsemon_server.store.frames import Frames
from tsemon_server.store.ledger.runs import FramesSeen

MOST_LINES = 2000
"""That are remembered."""
NONFINITE = ("nonfinite", "nonfinite_entries")
"""Measures that count what is not finite: the hidden states of a training, the parameters of a scan's checkpoint."""


class Lines:
    """Losses as they were when they were last asked for: most runs of a list have ended, and reading one takes 1 ms."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[FramesSeen, LossLine | None]] = {}

    def of(self, frames: Frames, run_id: str, seen: FramesSeen, points: int) -> LossLine | None:
        """The loss of a run that has so many frames."""
        at, line = self._known.get((run_id, points), (None, None))
        if at != seen:
            line = _loss(frames, run_id, points)
            if len(self._known) >= MOST_LINES:
                self._known.clear()
            self._known[run_id, points] = seen, line
        return line


def glances(store: Store, lines: Lines, asked: GlancesQuery) -> Glances:
    """The runs that were asked for, each once."""
    with store.read() as reader:
        seen = reader.runs.frames_seen(asked.run_ids)
        there = [run_id for run_id in dict.fromkeys(asked.run_ids) if run_id in seen]
        newest = reader.frames.layers_at(reader.runs.newest_steps(there))
        stacks = reader.runs.stacks_now(there)
        return Glances(
            glances=[
                Glance(
                    run_id=run_id,
                    loss=lines.of(reader.frames, run_id, seen[run_id], asked.points),
                    worst=_worst(newest.get(run_id, ()), stacks.get(run_id)),
                )
                for run_id in there
            ]
        )


def _loss(frames: Frames, run_id: str, points: int) -> LossLine | None:
    spans, stats = bucketed(frames.metric(run_id, "scalars", "loss").points(points, ends_alone=True), ends_alone=True)
    return LossLine(step=middles(spans), mean=nullable(stats[:, 0, 1])) if len(spans) else None


def _worst(frames: Sequence[Mapping[str, NDArray[np.floating[Any]]]], stacks: Stacks | None) -> Worst | None:
    layers: dict[str, NDArray[np.floating[Any]]] = {}
    for one in frames:
        layers = filled(layers, one)
    worst = worst_of(layers)
    if worst is None or stacks is None:
        return worst
    return worst.model_copy(update={"label": stacks.label(worst.layer, len(layers[worst.metric]))})


def worst_of(layers: Mapping[str, NDArray[np.floating[Any]]]) -> Worst | None:
    """The layer with a value that is not finite, else the one with the lowest token diversity.

    In runs without diversity, it is the layer with the highest token similarity.

    Most measures are NaN where they are undefined, which is no trouble: `nonfinite` counts what is, `nonfinite_entries`
    among parameters, and where nobody measured the first the NaN of a diversity or similarity tells.
    """
    nonfinite = layers.get("nonfinite")
    for metric in NONFINITE:
        counted = layers.get(metric)
        if counted is not None and (counted > 0).any():
            layer = int(np.nanargmax(counted))
            return Worst(metric=metric, layer=layer, value=float(counted[layer]))
    for metric, values in sorted(layers.items()):
        if np.isinf(values).any():
            return Worst(metric=metric, layer=int(np.isinf(values).argmax()), value=None)
    metric = "token_diversity" if len(layers.get("token_diversity", ())) else "token_similarity"
    tokens = layers.get(metric)
    if tokens is None or not len(tokens):
        return None
    is_nan = np.isnan(tokens)
    if is_nan.any() and nonfinite is None:
        return Worst(metric=metric, layer=int(is_nan.argmax()), value=None)
    if is_nan.all():
        return None
    layer = int(np.nanargmin(tokens) if metric == "token_diversity" else np.nanargmax(tokens))
    return Worst(metric=metric, layer=layer, value=float(tokens[layer]))
