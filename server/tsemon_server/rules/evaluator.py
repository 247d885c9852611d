"""Rules at work on the frames of a run, one after the other: live, replayed, or tried on a stored run, all the same.

The cost of a frame does not grow with what came before, and what is remembered can be stored between any two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tsemon_server.rules import evidence, state
from tsemon_server.rules.engine import Change, Kind, Track, Verdict, advance
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


class Evaluator:
    """Rules, ready to read frames."""

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
        if state.first_step is None:
            state.first_step = view.step
        slots = self._program.run(view, state.cells)
        state.last_step, state.num_samples = view.step, state.num_samples + 1
        changes = []
        for place, compiled in enumerate(self._compiled):
            verdict = _verdict(compiled, slots, state)
            change = advance(compiled.rule, state.tracks[place], verdict, view.step)
            if change is not None:
                changes.append((place, change))
        return [self._event(place, change, view, slots, state) for place, change in changes]

    def statuses(self, state: State) -> list[RuleStatus]:
        """How each rule stands."""
        return [
            RuleStatus(rule, "unknown" if track.judged_step is None else track.state, track.judged_step)
            for rule, track in zip(self.rules, state.tracks, strict=True)
        ]

    def dump(self, held: State) -> bytes:
        """What `load` gives back, with these rules or with others that share some."""
        return state.dump(held, [*self._cell_nodes.items()], self._rule_keys)

    def load(self, raw: bytes) -> State:
        """Raises UnreadableState."""
        places = {key: place for place, key in enumerate(self._rule_keys)}
        return state.load(raw, self.start(), self._cell_nodes, places)

    def _event(self, place: int, change: Change, view: View, slots: Slots, state: State) -> Event:
        compiled = self._compiled[place]
        rule = compiled.rule
        firing = [
            r.name for r, t in zip(self.rules, state.tracks, strict=True) if t.state == "firing" and r is not rule
        ]
        window = {says: state.cells[node][0] for says, node in self._recent[place].items() if state.cells[node]}
        has_ended = change.kind in ("resolved", "withdrawn")
        return Event(
            rule=rule,
            kind=change.kind,
            pending_step=change.pending_step,
            firing_step=change.firing_step,
            resolved_step=view.step if has_ended else None,
            summary=evidence.summary(compiled, slots),
            evidence=evidence.evidence(compiled, change, view, slots, window, firing),
            advice={"text": filled(rule.advice, evidence.numbers(compiled, slots)), "source": rule.source},
        )


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
