"""Lets the rules read each new frame of a run, and keeps the alerts that come of it.

Runs inside the transaction that stores the frames: an alert is visible before the frame that caused it is acknowledged,
and a server that dies in between has stored neither. What a rule remembers is stored too: a restart forgets nothing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tsemon.wire import Frame
from tsemon_server.alerts.routes import BODIES, make_router
from tsemon_server.rules import RULES, Event, Rule, Track, View, advance
from tsemon_server.store import RuleState, Writer

__all__ = ["BODIES", "Rule", "Watch", "make_router"]

log = logging.getLogger(__name__)


class Watch:
    """The rules at work. `on_error` is told the name of a rule that raised."""

    def __init__(self, rules: Sequence[Rule] | None = None, on_error: Callable[[str], None] = lambda _: None) -> None:
        self._rules = RULES if rules is None else tuple(rules)
        self._on_error = on_error

    def observe(self, writer: Writer, run_id: str, attempt: int, frames: Sequence[Frame]) -> list[int]:
        """Evaluate the rules on `frames` of the current attempt in step order; the ids of the alerts this resolved.

        A frame whose step was evaluated already, or is before that, is late: the rules have moved on.
        """
        known = writer.rule_state(run_id)
        if known is None or known.attempt != attempt:
            known = RuleState(attempt, -1, 0, "", b"{}")
        step, resolved = known.step, list[int]()
        stored = json.loads(known.state)
        tracks = {rule.name: self._remembered(rule, stored.get(rule.name), run_id) for rule in self._rules}
        for frame in sorted(frames, key=lambda frame: (frame.step, frame.seq)):
            if frame.step <= step:
                continue
            step, view = frame.step, _view(frame)
            for rule in self._rules:
                tracks[rule.name], event = self._advanced(rule, tracks[rule.name], view, run_id)
                if event is not None:
                    resolved += _apply(writer, run_id, attempt, rule, event)
        if step != known.step:
            kept = {name: track.to_json() for name, track in tracks.items()}
            writer.keep_rule_state(run_id, attempt, step, "", json.dumps(kept).encode())
        return resolved

    def _remembered(self, rule: Rule, stored: dict[str, Any] | None, run_id: str) -> Track:
        try:
            return Track.from_json(stored)
        except Exception:  # written by another version of the rule
            log.exception("what rule %s remembered of run %s cannot be read; it starts anew", rule.name, run_id)
            self._on_error(rule.name)
            return Track()

    def _advanced(self, rule: Rule, track: Track, view: View, run_id: str) -> tuple[Track, Event | None]:
        try:
            return advance(rule, track, view)
        except Exception:  # a rule is no reason to lose frames
            log.exception("rule %s failed at step %d of run %s; it skips this frame", rule.name, view.step, run_id)
            self._on_error(rule.name)
            return track, None


def _view(frame: Frame) -> View:
    layers = {name: np.frombuffer(values.data, "<f4") for name, values in frame.layers.items()}
    return View(step=frame.step, scalars=frame.scalars, layers=layers)


def _apply(writer: Writer, run_id: str, attempt: int, rule: Rule, event: Event) -> list[int]:
    """Write what the event says; the id of the alert that it resolved."""
    seen: dict[str, Any] = {
        "pending_step": event.pending_step,
        "firing_step": event.firing_step,
        "summary": event.summary,
        "evidence": strict(event.evidence),
    }
    if event.kind == "withdrawn":
        writer.withdraw_alert(run_id, rule.name)
    elif event.kind == "resolved":
        # Summary and evidence stay those of the firing: they are the reason to look at it afterwards.
        ended = writer.change_alert(run_id, rule.name, "firing", state="resolved", resolved_step=event.resolved_step)
        return [] if ended is None else [ended]
    elif event.kind == "pending" or writer.change_alert(run_id, rule.name, "pending", state="firing", **seen) is None:
        about = {"family": rule.family, "severity": rule.severity, "advice": dict(rule.advice)}
        writer.open_alert(run_id, attempt, rule.name, state=event.kind, **about, **seen)
    return []


def strict(value: Any) -> Any:
    """`value` as strict JSON can carry it: numpy becomes plain, what is not finite becomes None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value
