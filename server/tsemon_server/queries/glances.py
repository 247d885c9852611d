"""A run at a glance: where its loss goes, and how the worst of its layers does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsemon_server.filling import filled
from tsemon_server.queries.reduce import bucketed
from tsemon_server.queries.service import middles, nullable
from tsemon_server.store import Frames, FramesSeen, Record, Store

MOST_LINES = 2000
"""That are remembered."""
NONFINITE = ("nonfinite", "nonfinite_entries")
"""Measures that count what is not finite: the hidden states of a training, the parameters of a scan's checkpoint."""


class LossLine(Record):
    """The loss over steps, in a few buckets."""

    step: list[int]
    """The middle between the first and the last sample of each bucket, ascending."""
    mean: list[float | None]
    """The mean of the finite values of each bucket; null where there is none."""


class Worst(Record):
    """The layer to look at first."""

    metric: str
    """What was measured: `nonfinite`, `nonfinite_entries`, a metric that is not finite, or else `token_similarity`."""
    layer: int
    """The layer, from 0."""
    value: float | None
    """What it is there; null where it is not finite."""


class Glance(Record):
    """A run at a glance."""

    run_id: str
    """The run's id."""
    loss: LossLine | None
    """Null where the run has no loss."""
    worst: Worst | None
    """Of the newest step; null where nothing of it tells."""


class Glances(Record):
    """Several runs at a glance."""

    glances: list[Glance]
    """In the order that was asked for, without runs that are not there."""


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


def glances(store: Store, lines: Lines, run_ids: Sequence[str], *, points: int) -> Glances:
    """These runs, each once, with their losses in at most `points` buckets."""
    with store.read() as reader:
        seen = reader.runs.frames_seen(run_ids)
        there = [run_id for run_id in dict.fromkeys(run_ids) if run_id in seen]
        newest = reader.frames.layers_at(reader.runs.newest_steps(there))
        return Glances(
            glances=[
                Glance(
                    run_id=run_id,
                    loss=lines.of(reader.frames, run_id, seen[run_id], points),
                    worst=_worst(newest.get(run_id, ())),
                )
                for run_id in there
            ]
        )


def _loss(frames: Frames, run_id: str, points: int) -> LossLine | None:
    spans, stats = bucketed(frames.metric(run_id, "scalars", "loss").points(points, ends_alone=True), ends_alone=True)
    return LossLine(step=middles(spans), mean=nullable(stats[:, 0, 1])) if len(spans) else None


def _worst(frames: Sequence[Mapping[str, NDArray[np.floating[Any]]]]) -> Worst | None:
    layers: dict[str, NDArray[np.floating[Any]]] = {}
    for one in frames:
        layers = filled(layers, one)
    return worst_of(layers)


def worst_of(layers: Mapping[str, NDArray[np.floating[Any]]]) -> Worst | None:
    """The layer with a value that is not finite, else the one whose tokens are the most alike.

    Most measures are NaN where they are undefined, which is no trouble: `nonfinite` counts what is, `nonfinite_entries`
    among parameters, and where nobody measured the first the NaN of a token similarity tells.
    """
    nonfinite, similarity = layers.get("nonfinite"), layers.get("token_similarity")
    for metric in NONFINITE:
        counted = layers.get(metric)
        if counted is not None and (counted > 0).any():
            layer = int(np.nanargmax(counted))
            return Worst(metric=metric, layer=layer, value=float(counted[layer]))
    for metric, values in sorted(layers.items()):
        if np.isinf(values).any():
            return Worst(metric=metric, layer=int(np.isinf(values).argmax()), value=None)
    if similarity is None or not len(similarity):
        return None
    is_nan = np.isnan(similarity)
    if is_nan.any() and nonfinite is None:
        return Worst(metric="token_similarity", layer=int(is_nan.argmax()), value=None)
    if is_nan.all():
        return None
    layer = int(np.nanargmax(similarity))
    return Worst(metric="token_similarity", layer=layer, value=float(similarity[layer]))
