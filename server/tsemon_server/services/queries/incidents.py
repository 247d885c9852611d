"""Incidents, with their cause within the step and their sequences from the frames around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray

from tsemon.catalogue import NUM_RECENT
from tsemon.errors import InvalidRange
from tsemon.wire import Array, Frame
from tsemon_answers.incidents import Incident, IncidentDetail, IncidentsQuery, SubStepQuery, Within
from tsemon_server.incidents import ORDER
from tsemon_server.incidents.grouping import SLACK
from tsemon_server.incidents.mechanism import SLOW, Arrays, Mechanism, mechanism_of
from tsemon_server.incidents.sequences import FAMILIES, largest_losses
from tsemon_server.services.queries.frames import nearest
from tsemon_server.store import Store
from tsemon_server.store.reading import Reader

NONFINITE_PARAMETERS = "nonfinite_parameters"
"""Scalar of a frame that shows the model before an optimizer step could spread NaN."""
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


def sub_step(store: Store, run_id: str, asked: SubStepQuery) -> Within:
    """The sub-step that stands out at a step. Raises UnknownFrame if nothing is recorded."""
    with store.read() as reader:
        at = nearest(reader, run_id, asked.step, asked.attempt)[0]
        if asked.healthy_step is not None and asked.healthy_step >= at.step:
            raise InvalidRange(f"expected a healthy step before step {at.step}, got {asked.healthy_step}")
        unknown = Arrays(layers={}, stacks=reader.runs.stacks(run_id, at.attempt))
        healthy, since = None, max(at.step - BEFORE, 0)
        if asked.healthy_step is not None:
            since = asked.healthy_step + 1
            before = reader.frames.after(run_id, at.attempt, max(since - BEFORE, 0) - 1, asked.healthy_step)
            healthy = _newest(before, unknown)
        newest = _newest(reader.frames.after(run_id, at.attempt, since - 1, at.step), unknown)
        found = mechanism_of(newest, healthy=healthy)
        step = newest.step_of(found.metric)
        if step is not None and newest.step is not None and step < newest.step:
            # The slow tier decides, and its numbers are told with those of its own sample.
            of_step = _newest(reader.frames.after(run_id, at.attempt, since - 1, step), unknown)
            again = mechanism_of(of_step, healthy=healthy)
            newest, found = (of_step, again) if again.block is not None else (newest, found)
    return _told(found, newest, healthy)


def _within(reader: Reader, incident: Incident, since: Iterable[Frame]) -> Within:
    if incident.family == "liveness":
        told = Mechanism(text="The cause is not a sub-step: it is in the process or in how it is measured.")
        return _told(told, Arrays(layers={}), None)
    left_step, ill = _left_step(reader, incident), _earlier(reader, incident)
    before = (
        frame
        for frame in reader.frames.after(
            incident.run_id, incident.attempt, max(left_step - BEFORE, 0) - 1, left_step - 1
        )
        if not any(first <= frame.step <= last for first, last in ill)
    )
    stacks = reader.runs.stacks(incident.run_id, incident.attempt)
    known = _newest(before, Arrays(layers={}, stacks=stacks))
    healthy = known if known.layers else None
    newest = Arrays(layers={}, stacks=stacks)
    found = Mechanism(text="The sub-step is unknown: there is no sample of the incident.")
    for frame in since:
        newest = _newest([frame], newest)
        found = mechanism_of(newest, rule=incident.rule, blocks=incident.blocks, healthy=healthy)
        is_whole = found.sub_step is None or any(name in newest.layers for name in SLOW)
        # The first sample that decides: later, the model has adapted, or NaN has spread.
        if (found.block is not None and is_whole) or newest.is_origin:
            break
    return _told(found, newest, healthy)


def _left_step(reader: Reader, incident: Incident) -> int:
    """The first step that was not healthy. A consequence of the cause may be seen before it."""
    ids = [int(one.alert_id) for one in incident.consequences]
    left = [int(alert.evidence.get("left_step", incident.left_step)) for alert in reader.alerts.by_ids(ids)]
    return max(min([incident.left_step, *left]), incident.left_step - SLACK)


def _earlier(reader: Reader, incident: Incident) -> list[tuple[int, int]]:
    """The first and last steps of earlier incidents of the attempt: their samples are not healthy.

    A process that stops, and a rule of the user's own, do not describe the network.
    """
    every = reader.incidents.find(IncidentsQuery(run_id=incident.run_id, attempt=incident.attempt))
    earlier = [
        one
        for one in every
        if one.left_step < incident.left_step and one.family != "liveness" and ORDER.knows(one.rule)
    ]
    return [(one.left_step, incident.left_step if one.ended_step is None else one.ended_step) for one in earlier]


def _told(found: Mechanism, newest: Arrays, healthy: Arrays | None) -> Within:
    steps = {
        "step": newest.step_of(found.metric),
        "healthy_step": None if healthy is None else healthy.step_of(found.metric),
    }
    return Within.model_validate(asdict(found) | steps)


def _newest(frames: Iterable[Frame], known: Arrays) -> Arrays:
    """The newest values of each metric. Metrics that no frame has keep their known values."""
    layers, heads, steps = dict(known.layers), dict(known.heads), dict(known.steps)
    step, is_origin = known.step, known.is_origin
    for frame in frames:
        step, is_origin = frame.step, NONFINITE_PARAMETERS in frame.scalars
        layers.update((name, _read(values)) for name, values in frame.layers.items())
        heads.update((name, _read(values)) for name, values in frame.heads.items())
        steps.update(dict.fromkeys(frame.layers, frame.step))
    return replace(known, layers=layers, heads=heads, step=step, steps=steps, is_origin=is_origin)


def _read(values: Array) -> NDArray[np.float64]:
    return np.frombuffer(values.data, "<f4").reshape(values.shape).astype(np.float64)
