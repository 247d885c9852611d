"""Incidents, with their cause within the step from the frames around them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tsemon.wire import Array, Frame
from tsemon_answers.incidents import Incident, IncidentDetail, Within
from tsemon_server.incidents.mechanism import Arrays, mechanism_of
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
    healthy, newest = _newest(before), _newest(since)
    found = mechanism_of(
        newest, rule=incident.rule, blocks=incident.blocks, healthy=healthy if healthy.layers else None
    )
    return Within.model_validate(found, from_attributes=True)


def _newest(frames: Iterable[Frame]) -> Arrays:
    """The newest values of each metric."""
    layers, heads = dict[str, NDArray[np.float64]](), dict[str, NDArray[np.float64]]()
    for frame in frames:
        layers.update((name, _read(values)) for name, values in frame.layers.items())
        heads.update((name, _read(values)) for name, values in frame.heads.items())
    return Arrays(layers=layers, heads=heads)


def _read(values: Array) -> NDArray[np.float64]:
    return np.frombuffer(values.data, "<f4").reshape(values.shape).astype(np.float64)
