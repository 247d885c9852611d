"""The comparisons of rules over the steps of a recording that is replayed, and when each rule was met.

A trace has a bounded number of points: if there are more samples, each point is the one of several that came closest to
holding, so that no crossing of a bound is lost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from tsemon_answers.rules import RuleTrace, TracedComparison, TracedPoint, TracedSpan
from tsemon_server.rules.conditions import Comparison
from tsemon_server.rules.evaluator import Evaluator, Event
from tsemon_server.rules.evidence import number
from tsemon_server.rules.plan import Row
from tsemon_server.rules.program import Measure, Term, View
from tsemon_server.rules.reading import Look
from tsemon_server.rules.rule import Rule
from tsemon_server.services.replay.recording import Attempt, Recording
from tsemon_server.services.replay.replaying import FRAMES_AT_ONCE

MAX_SPANS = 200
MAX_TRACES = 8
"""The newest attempts are kept."""
MAX_COMPARISONS = 12
"""In a trace."""

_SIGNS = {"above": 1, "at_least": 1, "below": -1, "at_most": -1}


class Traced:
    """A recording that traces rules while it is read."""

    def __init__(self, recording: Recording, rules: Sequence[Rule], points: int) -> None:
        self.name = recording.name
        self._recording = recording
        self._rules, self._points = rules, points
        self._tracers: list[_Tracer] = []

    @property
    def problems(self) -> list[str]:
        return self._recording.problems

    def attempts(self, own: Collection[str] = ()) -> Iterator[Attempt]:
        for place, attempt in enumerate(self._recording.attempts(own)):
            tracers = [_Tracer(rule, place + 1, self._points) for rule in self._rules]
            self._tracers = [*self._tracers, *tracers][-MAX_TRACES:]
            yield attempt._replace(views=_watched(attempt.views, tracers))

    def traces(self) -> list[RuleTrace]:
        """Complete once the recording was read."""
        return [tracer.trace() for tracer in self._tracers]


def _watched(views: Iterator[View], tracers: Sequence[_Tracer]) -> Iterator[View]:
    while some := [*islice(views, FRAMES_AT_ONCE)]:
        for tracer in tracers:
            tracer.see(some)
        yield from some


@dataclass
class _Point:
    """A sample of a comparison."""

    step: int
    seen: float
    layer: str | None
    bounds: Mapping[str, float]
    holds: bool | None
    margin: float
    """How far it is from not holding: above 0, or 0 for `at_least` and `at_most`, it holds. NaN if that is not known."""

    def is_nearer_than(self, other: _Point) -> bool:
        return math.isnan(other.margin) or self.margin > other.margin

    def shown(self) -> TracedPoint:
        bounds = {name: number(bound) for name, bound in self.bounds.items()}
        return TracedPoint(step=self.step, seen=number(self.seen), layer=self.layer, bounds=bounds, holds=self.holds)


@dataclass
class _Curve:
    """Points of one comparison: when there are too many, each two neighbors become one."""

    comparison: Comparison
    most: int
    points: list[_Point] = field(default_factory=list)
    samples_per_point: int = 1
    num_in_last: int = 0
    num_held: int = 0
    num_known: int = 0
    nearest: _Point | None = None

    def add(self, point: _Point) -> None:
        self.num_held += point.holds is True
        self.num_known += point.holds is not None
        if not math.isnan(point.margin) and (self.nearest is None or point.is_nearer_than(self.nearest)):
            self.nearest = point
        if self.num_in_last % self.samples_per_point:
            self.points[-1] = _nearer(self.points[-1], point)
        else:
            if len(self.points) >= self.most:
                self._halve()
            self.points.append(point)
            self.num_in_last = 0
        self.num_in_last += 1

    def _halve(self) -> None:
        pairs = [self.points[place : place + 2] for place in range(0, len(self.points), 2)]
        self.points = [_nearer(pair[0], pair[-1]) for pair in pairs]
        self.samples_per_point *= 2

    def shown(self) -> TracedComparison:
        return TracedComparison(
            text=self.comparison.holds.says,
            value=self.comparison.value.says,
            points=[point.shown() for point in self.points],
            num_held=self.num_held,
            num_known=self.num_known,
            nearest=None if self.nearest is None else self.nearest.shown(),
        )


def _nearer(first: _Point, second: _Point) -> _Point:
    return second if second.is_nearer_than(first) else first


class _Tracer:
    """Watches one rule in one attempt."""

    def __init__(self, rule: Rule, attempt: int, points: int) -> None:
        self._attempt = attempt
        self._evaluator = Evaluator([rule])
        self._state = self._evaluator.start()
        (self._compiled,) = self._evaluator.compiled
        comparisons = self._compiled.comparisons[:MAX_COMPARISONS]
        self._curves = [_Curve(comparison, 2 * (points // 2)) for comparison in comparisons]
        self._lacks: set[Measure] = set(rule.all_measures)
        self._spans: list[TracedSpan] = []
        self._num_spans = self._num_samples = 0
        self._is_met = False
        self._first_step: int | None = None
        self._last_step: int | None = None

    def see(self, views: Sequence[View]) -> None:
        """The next frames; one whose step is not after the last one changes nothing."""
        for event in self._evaluator.read([(self._state, views)], self._look)[0]:
            self._note(event)

    def _look(self, looks: Sequence[Look]) -> None:
        step = looks[0].view.step
        self._first_step = step if self._first_step is None else self._first_step
        self._last_step, self._num_samples = step, self._num_samples + 1
        self._lacks = {measure for measure in self._lacks if all(measure.of(look.view) is None for look in looks)}
        for curve in self._curves:
            first, *others = (_point(curve.comparison, look.view, look.values) for look in looks)
            for other in others:
                first = _nearer(first, other)
            curve.add(first)

    def trace(self) -> RuleTrace:
        return RuleTrace(
            rule=self._compiled.rule.name,
            attempt=self._attempt,
            first_step=self._first_step,
            last_step=self._last_step,
            num_samples=self._num_samples,
            samples_per_point=self._curves[0].samples_per_point if self._curves else 1,
            comparisons=[curve.shown() for curve in self._curves],
            spans=self._spans,
            num_spans=self._num_spans,
            not_measured=sorted({measure.name for measure in self._lacks}) if self._num_samples else [],
        )

    def _note(self, event: Event) -> None:
        self._num_spans += not self._is_met
        self._is_met = event.kind in ("pending", "firing")
        span = TracedSpan(pending_step=event.pending_step, firing_step=event.firing_step, end_step=event.resolved_step)
        if self._num_spans <= MAX_SPANS:
            self._spans[self._num_spans - 1 :] = [span]


def _point(comparison: Comparison, view: View, slots: Row) -> _Point:
    seen, bounds = slots[comparison.value.index], {name: slots[term.index] for name, term in comparison.bounds}
    holds, layer = slots[comparison.holds.index], None
    margin: Any = _margin(seen, bounds) if bounds else _of_answer(holds)
    if isinstance(seen, np.ndarray):
        place = _deciding(margin, comparison.layers) if isinstance(margin, np.ndarray) else None
        if bounds:
            margin = math.nan if place is None else float(margin[place])
        bounds = {name: _at(bound, place) for name, bound in bounds.items()}
        layer = None if place is None else _label(view, place, len(seen), comparison.value)
        seen = _at(seen, place)
    bounds = {name: float(bound) for name, bound in bounds.items()}
    return _Point(view.step, float(seen), layer, bounds, holds, margin)


def _margin(seen: Any, bounds: Mapping[str, Any]) -> Any:
    """How far the value is on the right side of the bound that is nearest, layer by layer if it has layers."""
    if isinstance(seen, np.ndarray) and any(np.shape(bound) not in ((), seen.shape) for bound in bounds.values()):
        return np.empty(0)  # of another depth: nothing holds there
    margin = functools.reduce(np.minimum, [_SIGNS[name] * (seen - bound) for name, bound in bounds.items()])
    return margin if isinstance(margin, np.ndarray) else float(margin)


def _of_answer(holds: bool | None) -> float:
    return math.nan if holds is None else float(holds)


def _deciding(margin: np.ndarray[Any, Any], layers: Any) -> int | None:
    """The layer that decides whether a comparison of layers holds: of `any` the one farthest across the bound."""
    if not len(margin) or np.isnan(margin).all():
        return None
    if layers in ("first", "last"):
        return 0 if layers == "first" else len(margin) - 1
    known = int(np.count_nonzero(~np.isnan(margin)))
    num = {"any": 1, "all": known}.get(layers) if isinstance(layers, str) else None
    if num is None:
        num = layers["layers"] if "layers" in layers else math.ceil(layers["share"] * known)
    descending = np.argsort(-margin, kind="stable")  # NaN comes last
    return int(descending[min(max(int(num), 1), known) - 1])


def _at(values: Any, place: int | None) -> float:
    if not isinstance(values, np.ndarray):
        return float(values)
    return math.nan if place is None else float(values[place])


def _label(view: View, place: int, num_layers: int, value: Term) -> str:
    assert value.layers is not None
    at = view.place(value.layers.of(view, num_layers)[place], is_of_states=view.is_of_states(value.layers.measure))
    return str(at.get("label", at["layer"]))
