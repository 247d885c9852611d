"""Rules at work on the frames of runs: live, replayed, or tried on a stored run.

The cost of a frame does not grow with the frames before, and the state can be stored between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tsemon.catalogue import SCALARS
from tsemon_server.rules import evidence, state
from tsemon_server.rules.engine import Change, Kind, Track, TrackState
from tsemon_server.rules.plan import Batch, Plan
from tsemon_server.rules.program import Program, View, digest
from tsemon_server.rules.reading import Attempt, Look, attempts_of
from tsemon_server.rules.rule import Compiled, Rule, compile_rule, filled, shown_numbers
from tsemon_server.rules.state import State
from tsemon_server.rules.tracking import Courses, Standing
from tsemon_server.rules.waiting import Waiting


@dataclass(frozen=True)
class Event:
    """A change of an alert's state."""

    rule: Rule
    kind: Kind
    pending_step: int
    firing_step: int | None
    resolved_step: int | None
    """Where it ended; for a withdrawn alert too."""
    summary: str
    """One sentence for people."""
    evidence: dict[str, Any]
    """The values that the rule saw and their bounds, as plain JSON."""
    advice: dict[str, str]
    """What to try (`text`), and where that comes from (`source`)."""


@dataclass(frozen=True)
class RuleStatus:
    """How a rule stands on a run."""

    rule: Rule
    state: Literal["quiet", "pending", "firing", "unknown"]
    """unknown: it has never had all that it needs."""
    judged_step: int | None
    """The last step at which it had."""
    waits_for: str = ""
    """Why it cannot have fired yet: the samples and steps that must still come. Empty if enough have come."""
    is_held_back: bool = False
    """Whether it cannot fire now, because its `only_while` does not hold."""


class _Told(NamedTuple):
    """The state of a rule's alert, and the stack that it is about."""

    state: Literal["pending", "firing"]
    stack: int


class Evaluator:
    """Rules, ready to read frames.

    In a model with several stacks they read each stack by itself, as if it was the model. A rule nevertheless has one alert
    at a time, about the stack that was first to fire. If another stack fires when this alert is over, a new one is about it.
    """

    def __init__(self, rules: Sequence[Rule], on: Literal["frame", "clock"] = "frame") -> None:
        self.rules = tuple(rule for rule in rules if rule.on == on)
        program = self._program = Program()
        self.compiled = [compile_rule(rule, program) for rule in self.rules]
        self._shown = [shown_numbers(compiled, program) for compiled in self.compiled]
        self._plan = Plan(program, [compiled.when for compiled in self.compiled])
        self._cell_keys = program.cell_keys()
        self.size_bytes = program.size_bytes
        """Estimated memory of the compiled rules."""
        self.own_scalars = frozenset(_own_scalars(self.compiled))
        """Names of the user's own scalars that they read."""
        self._rule_keys = [digest(rule.name) for rule in self.rules]  # an edited rule goes on

    def start(self) -> State:
        """Of an attempt that was not looked at yet."""
        return State(self._plan.fresh_cells(), [Track() for _ in self.rules])

    def read(
        self, each: Sequence[tuple[State, Sequence[View]]], on_frame: Callable[[Sequence[Look]], None] | None = None
    ) -> list[list[Event]]:
        """Read the next frames of several attempts, of any runs, and give the events of each in the order of steps.

        This is the same as reading the frames one by one, and costs a fraction of it. A frame whose step is not after the
        last one of its attempt changes nothing. Each attempt may be named once. If this raises, all states are as before.
        `on_frame` gets each frame that is read, with its numbers, in each stack.
        """
        attempts = attempts_of(each, self.start)
        readings = [reading for attempt in attempts for reading in attempt.readings]
        views = [view for reading in readings for view in reading.views]
        if not views:
            return [[] for _ in each]
        batch = Batch(self._plan, views, [reading.span for reading in readings])
        for reading in readings:
            reading.courses = Courses(self.compiled, reading.span, reading.state, batch)
        events = [[*self._events(attempt, batch)] for attempt in attempts]
        if on_frame is not None:
            for attempt in attempts:
                for frame in range(len(attempt.frames)):
                    on_frame(attempt.looks(frame, batch))
        for attempt in attempts:
            attempt.keep(batch)
        return events

    def advance(self, state: State, view: View) -> list[Event]:
        """Read the next frame of an attempt."""
        return self.read([(state, [view])])[0]

    def statuses(self, state: State) -> list[RuleStatus]:
        """How each rule stands."""
        states = [state, *state.others]
        waiting = Waiting(self._program, state, self.start())
        return [
            _status(compiled, [one.tracks[place] for one in states], waiting)
            for place, compiled in enumerate(self.compiled)
        ]

    def dump(self, held: State) -> bytes:
        """The state as bytes, for `load` of these rules or of others that share some."""
        return state.dump(held, [*self._cell_keys], self._rule_keys)

    def load(self, raw: bytes) -> State:
        """Raises UnreadableState."""
        places = {key: place for place, key in enumerate(self._rule_keys)}
        return state.load(raw, self.start, self._cell_keys, places)

    def _events(self, attempt: Attempt, batch: Batch) -> Iterator[Event]:
        moving = attempt.moving()
        for frame in attempt.changed_frames():
            looks = attempt.looks(frame, batch)
            firing = [place for place in moving if any(look.after(place).state == "firing" for look in looks)]
            for place in moving:
                for change, stack in _changes(place, looks, attempt.frames[frame].step):
                    also = [self.rules[number].name for number in firing if number != place]
                    yield self._event(place, change, stack, looks, attempt.frames[frame], batch, also)

    def _event(
        self, place: int, change: Change, stack: int, looks: Sequence[Look], frame: View, batch: Batch, also: list[str]
    ) -> Event:
        compiled = self.compiled[place]
        rule = compiled.rule
        shown = _shown(compiled, stack, looks)
        view, values = shown.view if compiled.is_of_layers else frame, shown.values
        window = {says: batch.recent_at(shown.row, shown.span, key) for says, key in self._shown[place].items()}
        has_ended = change.kind in ("resolved", "withdrawn")
        is_of_stack = any(measure.kind != "scalar" for measure in compiled.when.measures)
        blocks, is_found = compiled.where.blocks(
            [(look.values, look.view) for look in ([shown] if is_of_stack else looks)]
        )
        seen = evidence.evidence(compiled, change, view, values, window, also, blocks)
        named = seen["numbers"] | evidence.where(view, blocks if is_found else None, change.left_step)
        return Event(
            rule=rule,
            kind=change.kind,
            pending_step=change.pending_step,
            firing_step=change.firing_step,
            resolved_step=view.step if has_ended else None,
            summary=evidence.summary(compiled, filled(rule.title, named), values, view, seen.get("stack")),
            evidence=seen,
            advice={"text": filled(rule.advice, named), "source": rule.source},
        )


def _changes(place: int, looks: Sequence[Look], step: int) -> Iterator[tuple[Change, int]]:
    """Changes of the alert of a rule at a frame, each with the stack that it is about."""
    if len(looks) == 1:
        change = looks[0].change(place)
        if change is not None:
            yield change, 0
        return
    before = _told([look.before(place) for look in looks])
    now = _told([look.after(place) for look in looks])
    if now == before:
        return
    is_the_same = before is not None and now is not None and (before.state, now.state) == ("pending", "firing")
    if before is not None and not is_the_same:
        over = looks[before.stack].change(place)
        assert over is not None
        yield over, before.stack
    if now is not None:
        yield looks[now.stack].change(place) or _known_before(looks[now.stack].after(place), step), now.stack


def _known_before(standing: Standing, step: int) -> Change:
    """An alert that has fired, or is pending, since an earlier frame; until now the alert was about another stack."""
    assert standing.state != "quiet"
    assert standing.pending_step is not None
    assert standing.left_step is not None
    fired = step if standing.state == "firing" else None
    return Change(standing.state, standing.left_step, step, fired, standing.pending_step, None)


def _shown(compiled: Compiled, stack: int, looks: Sequence[Look]) -> Look:
    """The stack that an alert shows: for a rule on the whole run, where its blocks are, or its further numbers known."""
    if any(measure.kind != "scalar" for measure in compiled.when.measures):
        return looks[stack]
    for look in looks if len(looks) > 1 else ():
        if compiled.where.finds(look.values, look.view):
            return look
    known = (look for look in looks if None not in evidence.numbers(compiled, look.values).values())
    return next(known, looks[stack])


def _told(standings: Sequence[Standing]) -> _Told | None:
    """The alert of a rule: about the stack that was the first to fire, or else the first to be pending."""
    each = [*enumerate(standings)]
    firing = [(one.firing_step or 0, stack) for stack, one in each if one.state == "firing"]
    if firing:
        return _Told("firing", min(firing)[1])
    pending = [(one.pending_step or 0, stack) for stack, one in each if one.state == "pending"]
    return _Told("pending", min(pending)[1]) if pending else None


def _own_scalars(each: Sequence[Compiled]) -> Iterator[str]:
    for compiled in each:
        for term in (compiled.when, compiled.clear, compiled.only_while):
            measures = () if term is None else term.measures
            yield from (one.name for one in measures if one.kind == "scalar" and one.name not in SCALARS)


def _status(compiled: Compiled, tracks: Sequence[Track], waiting: Waiting) -> RuleStatus:
    """The state of a rule in all stacks together."""
    rule = compiled.rule
    judged = [track.judged_step for track in tracks if track.judged_step is not None]
    if not judged:
        return RuleStatus(rule, "unknown", None, waiting.of(compiled, is_unknown=True))
    state = min((track.state for track in tracks), key=_LOUDEST.index)
    is_held_back = state == "quiet" and all(track.is_held_back for track in tracks)
    return RuleStatus(rule, state, max(judged), "" if state == "firing" else waiting.of(compiled), is_held_back)


_LOUDEST: tuple[TrackState, ...] = ("firing", "pending", "quiet")
