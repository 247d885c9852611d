"""A rule's alert over the rows of a batch: the verdicts, and where they changed its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tsemon_server.rules.engine import Change, Track, TrackState, Verdict, advance
from tsemon_server.rules.remembering import Span
from tsemon_server.rules.rule import Compiled, Hold
from tsemon_server.rules.state import State


class Standing(NamedTuple):
    """How an alert stands after a row."""

    state: TrackState
    pending_step: int | None
    firing_step: int | None


@dataclass
class Course:
    """What becomes of an alert in the rows of a span."""

    track: Track
    """After the last of them."""
    first: Standing
    """Before the first of them."""
    changes: dict[int, Change] = field(default_factory=dict)
    """By row."""
    standings: list[tuple[int, Standing]] = field(default_factory=list)
    """After each row with a change."""

    def before(self, row: int) -> Standing:
        return next((standing for place, standing in reversed(self.standings) if place < row), self.first)

    def after(self, row: int) -> Standing:
        return self.before(row + 1)


def follow(compiled: Compiled, track: Track, span: Span, state: State, columns: Sequence[Any]) -> Course:
    """The verdicts of a rule on the rows of a span, one after the other; `track` stays as it is."""
    verdicts = _verdicts(compiled, span, columns)
    early = min(_num_early(compiled.rule.after, span, state), len(verdicts))
    verdicts[:early] = ["between"] * early
    first = _standing(track)
    if track.state == "quiet" and "met" not in verdicts:
        return Course(_still_quiet(track, verdicts, span), first)
    streak = None if track.streak is None else replace(track.streak)
    course = Course(replace(track, streak=streak), first)
    for row, (verdict, step) in enumerate(zip(verdicts, span.steps, strict=True), span.start):
        change = advance(compiled.rule, course.track, verdict, step)
        if change is not None:
            course.changes[row] = change
            course.standings.append((row, _standing(course.track)))
    return course


def _standing(track: Track) -> Standing:
    return Standing(track.state, track.pending_step, track.firing_step)


def _still_quiet(track: Track, verdicts: Sequence[Verdict], span: Span) -> Track:
    """What a quiet alert becomes by frames of which none speaks for it."""
    judged = next((place for place in range(len(verdicts) - 1, -1, -1) if verdicts[place] != "unknown"), None)
    return track if judged is None else Track(judged_step=span.steps[judged])


def _verdicts(compiled: Compiled, span: Span, columns: Sequence[Any]) -> list[Verdict]:
    rows = slice(span.start, span.stop)
    answers = columns[compiled.when.index][rows]
    if compiled.clear is None:
        verdicts = [_VERDICTS[answer] for answer in answers]
    else:
        clear = columns[compiled.clear.index][rows]
        verdicts = [
            "met" if answer else "clear" if is_clear else "unknown" if answer is None else "between"
            for answer, is_clear in zip(answers, clear, strict=True)
        ]
    if compiled.only_while is not None:
        guard = columns[compiled.only_while.index][rows]
        verdicts = ["between" if holds is False else said for said, holds in zip(verdicts, guard, strict=True)]
    return verdicts


_VERDICTS: dict[bool | None, Verdict] = {True: "met", False: "clear", None: "unknown"}


def _num_early(after: Hold, span: Span, state: State) -> int:
    """How many of the rows a rule does not judge, because they come so early in the attempt."""
    by_samples = after.samples - state.num_samples
    if by_samples <= 0 and not after.steps:
        return 0
    first_step = span.steps[0] if state.first_step is None else state.first_step
    by_steps = sum(step - first_step < after.steps for step in span.steps)
    return max(by_samples, by_steps)
