"""Incidents, with their cause within the step from the frames around them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tsemon.wire import Array, Frame
from tsemon_answers.incidents import Incident, IncidentDetail, Within
from tsemon_server.incidents.mechanism import SLOW, Arrays, Mechanism, mechanism_of
from tsemon_server.store import Store
from tsemon_server.store.reading import Reader

BEFORE = 2000
"""Maximum number of steps to look back for a healthy sample."""


def describe(store: Store, incident_id: str) -> IncidentDetail:
    """The incident, and its cause within the step."""
    with store.read() as reader:
        incident = reader.incidents.get(incident_id)
        within = _within(reader, incident)
    return IncidentDetail.model_validate(incident.model_dump() | {"within": within})


def _within(reader: Reader, incident: Incident) -> Within:
    run_id, attempt, left_step = incident.run_id, incident.attempt, incident.left_step
    before = reader.frames.after(run_id, attempt, max(left_step - BEFORE, 0) - 1, left_step - 1)
    since = reader.frames.after(run_id, attempt, left_step - 1, incident.settles_step)
    healthy = _newest(before)
    newest = Arrays(layers={}, heads={})
    found = Mechanism(text="The sub-step is unknown: there is no sample of the incident.")
    for frame in since:
        newest = _newest([frame], newest)
        found = mechanism_of(
            newest, rule=incident.rule, blocks=incident.blocks, healthy=healthy if healthy.layers else None
        )
        is_whole = found.sub_step is None or any(name in newest.layers for name in SLOW)
        if found.block is not None and is_whole:  # the first sample that decides: later, the model has adapted
            break
    return Within.model_validate(found, from_attributes=True)


def _newest(frames: Iterable[Frame], known: Arrays | None = None) -> Arrays:
    """The newest values of each metric. Metrics that no frame has keep their known values."""
    layers = dict[str, NDArray[np.float64]]() if known is None else dict(known.layers)
    heads = dict[str, NDArray[np.float64]]() if known is None else dict(known.heads)
    for frame in frames:
        layers.update((name, _read(values)) for name, values in frame.layers.items())
        heads.update((name, _read(values)) for name, values in frame.heads.items())
    return Arrays(layers=layers, heads=heads)


def _read(values: Array) -> NDArray[np.float64]:
    return np.frombuffer(values.data, "<f4").reshape(values.shape).astype(np.float64)
