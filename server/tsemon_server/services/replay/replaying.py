"""Rules over a recording: the alerts that the service would have raised."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from tsemon_answers.alerts import Severity
from tsemon_answers.incidents import Verdict
from tsemon_answers.rules import Lacking, NotJudged, Waiting
from tsemon_server.incidents import ORDER, Symptom, incidents_of
from tsemon_server.rules.checking import lacks
from tsemon_server.rules.evaluator import Evaluator, Event
from tsemon_server.rules.program import View
from tsemon_server.rules.rule import Rule
from tsemon_server.services.replay.recording import Recording

FRAMES_AT_ONCE = 256
"""The rules read this many frames together. Larger batches need more memory and are hardly faster."""


@dataclass(frozen=True, kw_only=True)
class Fired:
    """An alert that fired, and what became of it."""

    rule: str
    family: str
    severity: Severity
    pending_step: int
    firing_step: int
    resolved_step: int | None = None
    """None where it fires to the end of the recording."""
    summary: str
    evidence: dict[str, Any] = field(repr=False)
    advice: dict[str, str] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The alerts and incidents of one recording."""

    run: str
    alerts: Sequence[Fired]
    """In the order in which they fired. What never fired is not among them."""
    num_frames: int
    problems: Sequence[str]
    """Parts of the recording that could not be read."""
    incidents: Sequence[Verdict] = ()
    """Of each attempt, in the order in which they were reported."""
    not_judged: Sequence[NotJudged] = ()
    """The rules whose condition was unknown in every frame."""
    waiting: Sequence[Waiting] = ()
    """Other rules that could not fire, because each attempt had too few samples or steps."""


def replay(recording: Recording, evaluator: Evaluator) -> Replayed:
    """Read a recording to its end, each attempt with rules that know of none before it."""
    attempts, num_frames = list[_Alerts](), 0
    judged, ready, needs = set[str](), set[str](), dict[str, str]()
    has = dict[str, set[str]](scalar=set(), layers=set(), heads=set())
    for first_step, views, has_ended in recording.attempts(evaluator.own_scalars):
        if attempts:
            before = attempts[-1]
            before.end(first_step if before.last_step is None else before.last_step)
        attempts.append(_Alerts())
        state, last_step = evaluator.start(), first_step
        rising = _rising(views)
        while chunk := [*islice(rising, FRAMES_AT_ONCE)]:
            num_frames += len(chunk)
            for view in chunk:
                has["scalar"].update(view.scalars)
                has["layers"].update(view.layers)
                has["heads"].update(view.heads)
            for event in evaluator.read([(state, chunk)])[0]:
                attempts[-1].enter(event)
            last_step = chunk[-1].step
        attempts[-1].last_step = last_step if has_ended() else None
        for status in evaluator.statuses(state) if state.num_samples else ():
            judged |= set() if status.judged_step is None else {status.rule.name}
            ready |= set() if status.waits_for else {status.rule.name}
            needs[status.rule.name] = status.waits_for
    return Replayed(
        run=recording.name,
        alerts=[alert for attempt in attempts for alert in attempt.alerts],
        incidents=[verdict for attempt in attempts for verdict in attempt.verdicts(has_loss="loss" in has["scalar"])],
        num_frames=num_frames,
        problems=recording.problems,
        not_judged=[
            _not_judged(rule, has, needs[rule.name])
            for rule in evaluator.rules
            if rule.name in needs and rule.name not in judged
        ],
        waiting=[
            Waiting(rule=name, waits_for=text) for name, text in needs.items() if name in judged and name not in ready
        ],
    )


def _not_judged(rule: Rule, has: Mapping[str, Collection[str]], waits_for: str) -> NotJudged:
    lacking = [Lacking.model_validate(one._asdict()) for one in lacks(rule, has)]
    return NotJudged(rule=rule.name, lacks=lacking, waits_for="" if lacking else waits_for)


class _Alerts:
    """The alerts of an attempt."""

    def __init__(self) -> None:
        self.alerts: list[Fired] = []
        """Alerts that fired."""
        self._open: dict[str, Symptom] = {}
        """Pending and firing ones, by rule."""
        self._over: list[Symptom] = []
        self.last_step: int | None = None
        """Set if the training ended."""

    def enter(self, event: Event) -> None:
        rule = event.rule.name
        if event.kind in ("pending", "firing"):
            self._open[rule] = _symptom(event)
        else:
            self._over.append(self._open.pop(rule).ended(event.resolved_step, is_cleared=True))
        if event.kind == "firing":
            self.alerts.append(_fired(event))
        elif event.kind == "resolved":
            self._resolve(rule, event.resolved_step)

    def end(self, at_step: int) -> None:
        """A new attempt ends what fires, at its first step or at the end of the training, but never before it fired."""
        for rule, one in self._open.items():
            if one.firing_step is None and not one.is_stall:
                continue
            step = max(one.firing_step or 0, at_step)
            self._over.append(one.ended(step, is_cleared=False))
            if one.firing_step is not None:
                self._resolve(rule, step)
        self._open.clear()

    def _resolve(self, rule: str, step: int | None) -> None:
        place = max(place for place, alert in enumerate(self.alerts) if alert.rule == rule)
        self.alerts[place] = replace(self.alerts[place], resolved_step=step)

    def verdicts(self, *, has_loss: bool) -> list[Verdict]:
        last_step, still = self.last_step, [*self._open.values()]
        if last_step is not None:
            ended = (one for one in still if one.firing_step is not None or one.is_stall)
            still = [one.ended(max(one.firing_step or 0, last_step), is_cleared=False) for one in ended]
        incidents = incidents_of([*self._over, *still])
        return [incident.verdict(ORDER, has_loss=has_loss, last_step=last_step) for incident in incidents]


def _rising(views: Iterator[View]) -> Iterator[View]:
    """Without frames of a step that was seen before."""
    last_step = -1
    for view in views:
        if view.step > last_step:
            last_step = view.step
            yield view


def _symptom(event: Event) -> Symptom:
    rule = event.rule
    return Symptom.of(rule.name, rule.family, rule.severity, event.pending_step, event.firing_step, event.evidence)


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
