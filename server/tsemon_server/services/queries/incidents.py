"""Incidents, with their cause within the step and their sequences from the frames around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from tsemon.catalogue import NUM_RECENT
from tsemon.wire import Array, Frame
from tsemon_answers.incidents import Incident, IncidentDetail, Within
from tsemon_server.incidents.mechanism import SLOW, Arrays, Mechanism, mechanism_of
from tsemon_server.incidents.sequences import FAMILIES, largest_losses
from tsemon_server.store import Store
from tsemon_server.store.reading import Reader

BEFORE = 2000
"""Maximum number of steps to look back for a healthy sample."""


def describe(store: Store, incident_id: str) -> IncidentDetail:
    """The incident, its cause within the step, and the sequences with the largest losses."""
    with store.read() as reader:
        incident = reader.incidents.get(incident_id)
        left_step, first = incident.left_step, max(incident.left_step - NUM_RECENT, -1)
        around = list(reader.frames.after(incident.run_id, incident.attempt, first, incident.settles_step))
        within = _within(reader, incident, [frame for frame in around if frame.step >= left_step])
    sequences = largest_losses(around) if incident.family in FAMILIES else []
    return IncidentDetail.model_validate(
        incident.model_dump() | {"within": within, "sequences": [asdict(one) for one in sequences]}
    )


def _within(reader: Reader, incident: Incident, since: Iterable[Frame]) -> Within:
    left_step = incident.left_step
    before = reader.frames.after(incident.run_id, incident.attempt, max(left_step - BEFORE, 0) - 1, left_step - 1)
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
