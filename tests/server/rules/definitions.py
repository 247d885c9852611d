"""Rules for tests: as little as a rule needs, and what a test is about."""

import math

import numpy as np

from tsemon_server.rules import grammar
from tsemon_server.rules.documents import stored
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.parts import Part
from tsemon_server.rules.plan import Batch, Plan
from tsemon_server.rules.program import Program, View
from tsemon_server.rules.remembering import Span

ABOUT = {
    "family": "loss",
    "severity": "warning",
    "title": "The loss is high",
    "advice": "a",
    "source": "s",
    "origin": "o",
}
AT_ONCE = {"samples": 1}


def rule(when=None, name="test", **fields):
    """A rule that is met by a loss above 10 for three samples, and by whatever else is said."""
    when = {"value": [{"scalar": "loss"}], "above": 10} if when is None else when
    return stored({"name": name, **ABOUT, "for": {"samples": 3}, "when": when, **fields}, "test")


def loss_view(step, loss):
    return View(step, {} if loss is None else {"loss": loss})


def layers_view(step, **layers):
    return View(step, {}, {name: np.array(values, np.float32) for name, values in layers.items()})


def answers(when, views):
    """What a condition says of each view: True, False or None (unknown)."""
    evaluator = Evaluator([rule(when, **{"for": AT_ONCE, "clear_for": AT_ONCE})])
    state, said = evaluator.start(), []
    for view in views:
        evaluator.advance(state, view)
        track = state.tracks[0]
        said.append(track.state == "firing" if track.judged_step == view.step else None)
    return said


def numbers(value, views):
    """What a value is on each view; None where it is undefined."""
    program = Program()
    term = grammar.value(Part(value), program)
    plan = Plan(program, [term])
    batch = Batch(plan, views, [Span(0, [view.step for view in views], plan.fresh_cells())])
    return [None if math.isnan(number) else number for number in batch[term.index]]


def events(rules, views):
    evaluator = Evaluator(rules)
    state = evaluator.start()
    return [event for view in views for event in evaluator.advance(state, view)]


def changes(rules, views):
    return [(event.kind, event.pending_step, event.firing_step, event.resolved_step) for event in events(rules, views)]
