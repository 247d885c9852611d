"""A run at a glance: where its loss goes, and how the worst of its layers does."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from tsemon_answers.runs import FIRST_CHOICE, Glance, Glances, GlancesQuery, LossLine, RunDetail, Worst
from tsemon_server.filling import filled
from tsemon_server.rules import PACK
from tsemon_server.rules.nearness import Nearness
from tsemon_server.rules.program import View
from tsemon_server.services.queries.reduce import bucketed
from tsemon_server.services.queries.service import middles, nullable
from tsemon_server.store import Store
from tsemon_server.store.frames import MOST_BARE, Frames, Layers
from tsemon_server.store.ledger.runs import FramesSeen, Model
from tsemon_server.store.reading import Reader

UNKNOWN_MODEL = Model(frozenset(), None)
_NEARNESS = Nearness(rule for rule in PACK if rule.severity != "info")

MOST_KEPT = 2000
"""Maximum number of glances in memory."""
NONFINITE = ("nonfinite", "nonfinite_entries")
"""Measures that count what is not finite: the hidden states of a training, the parameters of a scan's checkpoint."""
RAW = "token_similarity"
OF_CHECKPOINTS = "param_norm"
TOKENS = FIRST_CHOICE, RAW
"""Measures whose NaN tells the same, in runs without the first of these."""


class Kept:
    """Glances as they were when they were last asked for: most runs of a list have ended, and making one takes 2 ms."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[FramesSeen, Glance]] = {}

    def get(self, run_id: str, points: int, seen: FramesSeen) -> Glance | None:
        """The glance at a run that still has the same frames."""
        at, glance = self._known.get((run_id, points), (None, None))
        return glance if at == seen else None

    def keep(self, glance: Glance, points: int, seen: FramesSeen) -> None:
        if len(self._known) >= MOST_KEPT:
            self._known.clear()
        self._known[glance.run_id, points] = seen, glance


def glances(store: Store, kept: Kept, asked: GlancesQuery) -> Glances:
    """The runs that were asked for, each once."""
    points = asked.points
    with store.read() as reader:
        seen = reader.runs.frames_seen(asked.run_ids)
        found = {run_id: kept.get(run_id, points, seen[run_id]) for run_id in asked.run_ids if run_id in seen}
        lacking = [run_id for run_id, glance in found.items() if glance is None]
        newest = _newest_layers(reader, lacking)
        models = reader.runs.models_now(lacking)
        for run_id in lacking:
            worst = _worst(newest.get(run_id, ()), models.get(run_id, UNKNOWN_MODEL))
            glance = found[run_id] = Glance(run_id=run_id, loss=_loss(reader.frames, run_id, points), worst=worst)
            kept.keep(glance, points, seen[run_id])
    return Glances(glances=[glance for glance in found.values() if glance is not None])


def described(store: Store, run_id: str) -> RunDetail:
    """All about a run besides its frames, with the metric that is shown first."""
    with store.read() as reader:
        run = reader.runs.detail(run_id)
        return run.model_copy(update={"default_metric": _default_metric(reader, run)})


def _default_metric(reader: Reader, run: RunDetail) -> str | None:
    """The metric that has a healthy range, else the one that is nearest to a threshold, else any but raw similarity."""
    if FIRST_CHOICE in run.metrics.layers:
        return FIRST_CHOICE
    model = reader.runs.models_now([run.run_id]).get(run.run_id, UNKNOWN_MODEL)
    worst = _worst(_newest_layers(reader, [run.run_id]).get(run.run_id, ()), model)
    named = re.findall(r"\w+", worst.metric) if worst else []  # an expression may have several
    known = [name for name in run.metrics.layers if name != RAW]
    return next((name for name in (*named, OF_CHECKPOINTS, *known) if name in known), None)


def _newest_layers(reader: Reader, run_ids: Sequence[str]) -> dict[str, list[Layers]]:
    """The layers of each run at its newest step that has any."""
    at, found = reader.runs.newest_steps(run_ids), dict[str, list[Layers]]()
    for _ in range(1 + MOST_BARE):
        if not at:
            break
        found |= reader.frames.layers_at(at)
        bare = [(run_id, one) for run_id, one in at.items() if not any(found.get(run_id, ()))]
        bare = [(run_id, one) for run_id, one in bare if reader.frames.recorded(run_id).layers]
        earlier = ((run_id, reader.frames.before(run_id, one)) for run_id, one in bare)
        at = {run_id: one for run_id, one in earlier if one is not None}
    return found


def _loss(frames: Frames, run_id: str, points: int) -> LossLine | None:
    spans, stats = bucketed(frames.metric(run_id, "scalars", "loss").points(points, ends_alone=True), ends_alone=True)
    return LossLine(step=middles(spans), mean=nullable(stats[:, 0, 1])) if len(spans) else None


def _worst(frames: Sequence[Layers], model: Model) -> Worst | None:
    layers: Layers = {}
    for one in frames:
        layers = filled(layers, one)
    return worst_of(layers, model)


def worst_of(layers: Layers, model: Model = UNKNOWN_MODEL) -> Worst | None:
    """The layer with a value that is not finite, else the one that is nearest to a threshold of a built-in rule.

    Rules of severity info do not count.

    Most measures are NaN where they are undefined, which is no trouble: `nonfinite` counts what is, `nonfinite_entries`
    among parameters, and where nobody measured the first the NaN of a diversity or similarity tells.
    """
    nonfinite = layers.get("nonfinite")
    for metric in NONFINITE:
        counted = layers.get(metric)
        if counted is not None and (counted > 0).any():
            layer = int(np.nanargmax(counted))
            return _named(metric, layer, float(counted[layer]), layers, model)
    for metric, values in sorted(layers.items()):
        if np.isinf(values).any():
            return _named(metric, int(np.isinf(values).argmax()), None, layers, model)
    for metric in TOKENS:
        is_nan = np.isnan(layers.get(metric, ()))
        if is_nan.any() and nonfinite is None:
            return _named(metric, int(is_nan.argmax()), None, layers, model)
    near = _NEARNESS.nearest(View(0, layers=layers, frozen=model.frozen, stacks=model.stacks))
    if near is None:
        return None
    place = near.place
    return Worst(
        metric=near.metric,
        layer=place["layer"],
        label=place.get("label"),
        value=near.value,
        rule=near.rule,
        threshold=near.threshold,
        decades=near.decades,
    )


def _named(metric: str, layer: int, value: float | None, layers: Layers, model: Model) -> Worst:
    label = None if model.stacks is None else model.stacks.label(layer, len(layers[metric]))
    return Worst(metric=metric, layer=layer, label=label, value=value)
