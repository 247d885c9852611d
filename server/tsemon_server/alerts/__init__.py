"""Lets the rules read each new frame of a run, and keeps the alerts that come of it.

Runs inside the transaction that stores the frames: an alert is visible before the frame that caused it is acknowledged,
and a server that dies in between has stored neither. What a rule remembers is stored too: a restart forgets nothing.
"""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tsemon.wire import Frame
from tsemon_server.rules import PACK, Evaluator, Event, Rule, View
from tsemon_server.store import RuleState, Writer

__all__ = ["Rule", "Watch", "apply"]

log = logging.getLogger(__name__)


class Watch:
    """The rules at work. `on_error` is told the name of a rule that raised."""

    def __init__(self, rules: Sequence[Rule] = PACK, on_error: Callable[[str], None] = lambda _: None) -> None:
        self._evaluator = Evaluator(rules)
        self._on_error = on_error

    def observe(self, writer: Writer, run_id: str, attempt: int, frames: Sequence[Frame]) -> list[int]:
        """Evaluate the rules on `frames` of the current attempt in step order; the ids of the alerts this resolved.

        A frame whose step was evaluated already, or is before that, is late: the rules have moved on.
        """
        known = writer.rule_state(run_id)
        if known is None or known.attempt != attempt:
            state = self._evaluator.start()
        else:
            state = self._evaluator.load(base64.b64decode(known.tracks["state"]))
        resolved = list[int]()
        for frame in sorted(frames, key=lambda frame: (frame.step, frame.seq)):
            for event in self._evaluator.advance(state, _view(frame)):
                resolved += apply(writer, run_id, attempt, event)
        kept = {"state": base64.b64encode(self._evaluator.dump(state)).decode()}
        writer.keep_rule_state(run_id, RuleState(attempt, state.last_step or 0, kept))
        return resolved


def _view(frame: Frame) -> View:
    layers = {name: np.frombuffer(values.data, "<f4") for name, values in frame.layers.items()}
    heads = {name: np.frombuffer(values.data, "<f4").reshape(values.shape) for name, values in frame.heads.items()}
    return View(frame.step, frame.scalars, layers, heads)


def apply(writer: Writer, run_id: str, attempt: int, event: Event) -> list[int]:
    """Write what the event says; the id of the alert that it resolved."""
    rule = event.rule
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
        about = {"family": rule.family, "severity": rule.severity, "advice": event.advice}
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
