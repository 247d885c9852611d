"""Rules at work on the frames of a run, one after the other: live, replayed, or tried on a stored run, all the same.

The cost of a frame does not grow with what came before, and what is remembered can be stored between any two of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tsemon_server.rules import evidence, state
from tsemon_server.rules.engine import Change, Kind, Track, TrackState, Verdict, advance
from tsemon_server.rules.memory import Recent
from tsemon_server.rules.program import Program, Slots, View, digest
from tsemon_server.rules.rule import Compiled, Rule, compile_rule, filled
from tsemon_server.rules.state import State


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
    """What the rule saw and held it against, as plain JSON."""
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


class _Look(NamedTuple):
    """A frame as the rules see it in one stack, or the whole frame if there is one stack."""

    view: View
    slots: Slots
    state: State
    changes: Sequence[Change | None]
    """One per rule."""


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
        self._program = Program()
        self._compiled = [compile_rule(rule, self._program) for rule in self.rules]
        self._recent = [_remember_recent(compiled, self._program) for compiled in self._compiled]
        self._cell_nodes = self._program.memory_keys
        self._rule_keys = [digest(rule.name) for rule in self.rules]  # an edited rule goes on

    def start(self) -> State:
        """Of an attempt that was not looked at yet."""
        return State(self._program.fresh_cells(), [Track() for _ in self.rules])

    def advance(self, state: State, view: View) -> list[Event]:
        """Read the next frame of an attempt. One whose step is not after the last one changes nothing."""
        if state.last_step is not None and view.step <= state.last_step:
            return []
        views = view.of_stacks()
        while len(state.others) < len(views) - 1:
            state.others.append(self.start())
        states = [state, *state.others][: len(views)]
        before = [_told(states, place) for place in range(len(self.rules))] if len(states) > 1 else ()
        looks = [self._look(of_stack, one) for of_stack, one in zip(states, views, strict=True)]
        if len(looks) == 1:
            changes = enumerate(looks[0].changes)
            return [self._event(place, change, 0, looks, view) for place, change in changes if change is not None]
        return [event for place, told in enumerate(before) for event in self._events(place, told, looks, view)]

    def statuses(self, state: State) -> list[RuleStatus]:
        """How each rule stands."""
        states = [state, *state.others]
        return [_status(rule, [one.tracks[place] for one in states]) for place, rule in enumerate(self.rules)]

    def dump(self, held: State) -> bytes:
        """What `load` gives back, with these rules or with others that share some."""
        return state.dump(held, [*self._cell_nodes.items()], self._rule_keys)

    def load(self, raw: bytes) -> State:
        """Raises UnreadableState."""
        places = {key: place for place, key in enumerate(self._rule_keys)}
        return state.load(raw, self.start, self._cell_nodes, places)

    def _look(self, state: State, view: View) -> _Look:
        """Read the frame in one stack."""
        if state.first_step is None:
            state.first_step = view.step
        slots = self._program.run(view, state.cells)
        state.last_step, state.num_samples = view.step, state.num_samples + 1
        changes = [
            advance(compiled.rule, track, _verdict(compiled, slots, state), view.step)
            for compiled, track in zip(self._compiled, state.tracks, strict=True)
        ]
        return _Look(view, slots, state, changes)

    def _events(self, place: int, before: _Told | None, looks: Sequence[_Look], view: View) -> Iterator[Event]:
        """Changes of the alert of a rule that reads several stacks."""
        now = _told([look.state for look in looks], place)
        if now == before:
            return
        is_the_same = before is None or (now is not None and (before.state, now.state) == ("pending", "firing"))
        if before is not None and not is_the_same:
            over = looks[before.stack].changes[place]
            assert over is not None
            yield self._event(place, over, before.stack, looks, view)
        if now is not None:
            change = looks[now.stack].changes[place]
            if change is None:  # it has fired, or is pending, since an earlier frame; the alert was about another stack
                fired = view.step if now.state == "firing" else None
                since_step = looks[now.stack].state.tracks[place].pending_step
                assert since_step is not None
                change = Change(now.state, view.step, fired, since_step, None)
            yield self._event(place, change, now.stack, looks, view)

    def _event(self, place: int, change: Change, stack: int, looks: Sequence[_Look], frame: View) -> Event:
        compiled = self._compiled[place]
        rule = compiled.rule
        states = [look.state for look in looks]
        firing = [
            r.name
            for number, r in enumerate(self.rules)
            if r is not rule and any(state.tracks[number].state == "firing" for state in states)
        ]
        view, slots, state, _ = _shown(compiled, stack, looks)
        view = view if compiled.is_of_layers else frame
        window = {says: state.cells[node][0] for says, node in self._recent[place].items() if state.cells[node]}
        has_ended = change.kind in ("resolved", "withdrawn")
        return Event(
            rule=rule,
            kind=change.kind,
            pending_step=change.pending_step,
            firing_step=change.firing_step,
            resolved_step=view.step if has_ended else None,
            summary=evidence.summary(compiled, slots, view),
            evidence=evidence.evidence(compiled, change, view, slots, window, firing),
            advice={"text": filled(rule.advice, evidence.numbers(compiled, slots)), "source": rule.source},
        )


def _shown(compiled: Compiled, stack: int, looks: Sequence[_Look]) -> _Look:
    """The stack that an alert shows: for a rule on the whole run, one in which its further numbers are known."""
    if any(measure.kind != "scalar" for measure in compiled.when.measures):
        return looks[stack]
    known = (look for look in looks if None not in evidence.numbers(compiled, look.slots).values())
    return next(known, looks[stack])


def _told(states: Sequence[State], place: int) -> _Told | None:
    """The alert of a rule: about the stack that was the first to fire, or else the first to be pending."""
    tracks = [(number, state.tracks[place]) for number, state in enumerate(states)]
    firing = [(track.firing_step or 0, number) for number, track in tracks if track.state == "firing"]
    if firing:
        return _Told("firing", min(firing)[1])
    pending = [(track.pending_step or 0, number) for number, track in tracks if track.state == "pending"]
    return _Told("pending", min(pending)[1]) if pending else None


def _status(rule: Rule, tracks: Sequence[Track]) -> RuleStatus:
    """The state of a rule in all stacks together."""
    judged = [track.judged_step for track in tracks if track.judged_step is not None]
    if not judged:
        return RuleStatus(rule, "unknown", None)
    return RuleStatus(rule, min((track.state for track in tracks), key=_LOUDEST.index), max(judged))


_LOUDEST: tuple[TrackState, ...] = ("firing", "pending", "quiet")


def _verdict(compiled: Compiled, slots: Slots, state: State) -> Verdict:
    rule = compiled.rule
    assert state.first_step is not None
    assert state.last_step is not None
    if state.num_samples <= rule.after.samples or state.last_step - state.first_step < rule.after.steps:
        return "between"
    if compiled.only_while is not None and slots[compiled.only_while.index] is False:
        return "between"
    answer = slots[compiled.when.index]
    if answer is True:
        return "met"
    is_clear = answer is False if compiled.clear is None else slots[compiled.clear.index] is True
    if is_clear:
        return "clear"
    return "unknown" if answer is None else "between"


def _remember_recent(compiled: Compiled, program: Program) -> Mapping[str, int]:
    """Nodes that keep the last samples of the numbers that the rule holds against something."""
    numbers = [comparison.value for comparison in compiled.comparisons if not comparison.value.axes]
    kept = Recent(evidence.SHOWN_SAMPLES)
    return {term.says: program.remember(term, "recent", kept, says=term.says).index for term in numbers}
