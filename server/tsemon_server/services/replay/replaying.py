"""Rules over a recording: the alerts that the service would have raised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from tsemon_answers.rules import Lacking, NotJudged
from tsemon_server.rules.checking import lacks
from tsemon_server.rules.evaluator import Evaluator, Event
from tsemon_server.rules.program import View
from tsemon_server.services.replay.recording import Recording

FRAMES_AT_ONCE = 256
"""The rules read this many frames together. Larger batches need more memory and are hardly faster."""


@dataclass(frozen=True, kw_only=True)
class Fired:
    """An alert that fired, and what became of it."""

    rule: str
    family: str
    severity: str
    pending_step: int
    firing_step: int
    resolved_step: int | None = None
    """None where it fires to the end of the recording."""
    summary: str
    evidence: dict[str, Any] = field(repr=False)
    advice: dict[str, str] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of one recording."""

    run: str
    alerts: Sequence[Fired]
    """In the order in which they fired. What never fired is not among them."""
    num_frames: int
    problems: Sequence[str]
    """What of the recording could not be read."""
    not_judged: Sequence[NotJudged] = ()
    """The rules whose condition was unknown in every frame."""


def replay(recording: Recording, evaluator: Evaluator) -> Replayed:
    """Read a recording to its end, each attempt with rules that know of none before it."""
    alerts, num_frames = list[Fired](), 0
    judged, has = set[str](), dict[str, set[str]](scalar=set(), layers=set(), heads=set())
    for first_step, views in recording.attempts():
        alerts = [_ended(alert, first_step) for alert in alerts]
        state, fires = evaluator.start(), dict[str, int]()
        rising = _rising(views)
        while chunk := [*islice(rising, FRAMES_AT_ONCE)]:
            num_frames += len(chunk)
            for view in chunk:
                has["scalar"].update(view.scalars)
                has["layers"].update(view.layers)
                has["heads"].update(view.heads)
            for event in evaluator.read([(state, chunk)])[0]:
                if event.kind == "firing":
                    fires[event.rule.name] = len(alerts)
                    alerts.append(_fired(event))
                elif event.kind == "resolved":
                    place = fires.pop(event.rule.name)
                    alerts[place] = replace(alerts[place], resolved_step=event.resolved_step)
        judged |= {status.rule.name for status in evaluator.statuses(state) if status.judged_step is not None}
    unknown = [rule for rule in evaluator.rules if num_frames and rule.name not in judged and rule.on == "frame"]
    return Replayed(
        run=recording.name,
        alerts=alerts,
        num_frames=num_frames,
        problems=recording.problems,
        not_judged=[
            NotJudged(rule=rule.name, lacks=[Lacking.model_validate(one._asdict()) for one in lacks(rule, has)])
            for rule in unknown
        ],
    )


def _rising(views: Iterator[View]) -> Iterator[View]:
    """Without frames of a step that was seen before."""
    last_step = -1
    for view in views:
        if view.step > last_step:
            last_step = view.step
            yield view


def _ended(alert: Fired, first_step: int) -> Fired:
    """A new attempt ends what fires at the step that it starts at, but never before it fired."""
    if alert.resolved_step is not None:
        return alert
    return replace(alert, resolved_step=max(alert.firing_step, first_step))


def _fired(event: Event) -> Fired:
    assert event.firing_step is not None
    return Fired(
        rule=event.rule.name,
        family=event.rule.family,
        severity=event.rule.severity,
        pending_step=event.pending_step,
        firing_step=event.firing_step,
        summary=event.summary,
        evidence=dict(event.evidence),
        advice=dict(event.advice),
    )
