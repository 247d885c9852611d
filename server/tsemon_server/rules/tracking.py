"""A rule's alert over the rows of a batch: the verdicts, and where they changed its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tsemon_server.rules.engine import Change, Track, TrackState, Verdict, advance, left_after
from tsemon_server.rules.plan import Batch
from tsemon_server.rules.remembering import Span
from tsemon_server.rules.rule import Compiled, Hold, Rule
from tsemon_server.rules.state import State


class Standing(NamedTuple):
    """How an alert stands after a row."""

    state: TrackState
    pending_step: int | None
    firing_step: int | None
    left_step: int | None


_QUIET = Standing("quiet", None, None, None)


@dataclass
class Course:
    """The changes of an alert in the rows of a span."""

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


class Courses:
    """The alerts of all rules in the rows of a span. Until `keep` the state stays as it is."""

    def __init__(self, compiled: Sequence[Compiled], span: Span, state: State, batch: Batch) -> None:
        self._tracks = state.tracks
        self._judged: list[tuple[Track, int]] = []
        """Alerts that are quiet, and stay so, with the last step at which all was there to judge them."""
        self._left: list[tuple[Track, int | None]] = []
        """The same alerts, with the first step since which they were not healthy."""
        self._moving: dict[int, Course] = {}
        """All others, by the place of their rule."""
        newest = span.stop - 1
        self._held_back = {
            place: batch[one.only_while.index][newest] is False
            for place, one in enumerate(compiled)
            if one.only_while is not None
        }
        for place, (one, track) in enumerate(zip(compiled, state.tracks, strict=True)):
            answers = batch[one.when.index][span.start : span.stop]
            clear = None if one.clear is None else batch[one.clear.index][span.start : span.stop]
            if track.state == "quiet" and True not in answers:
                if clear is not None:
                    self._left.append((track, left_after(track.left_step, clear, span.steps)))
                if answers[-1] is not None:
                    self._judged.append((track, span.steps[-1]))
                else:
                    verdicts = _verdicts(one, answers, span, state, batch)
                    known = [step for step, said in zip(span.steps, verdicts, strict=True) if said != "unknown"]
                    self._judged += [(track, known[-1])] if known else []
            else:
                self._moving[place] = _course(one.rule, track, _verdicts(one, answers, span, state, batch), clear, span)

    def changed_rows(self) -> set[int]:
        """Those in which an alert changed."""
        return {row for course in self._moving.values() for row in course.changes}

    def moving(self) -> set[int]:
        """The places of rules whose alerts are or were not quiet; no other changes or fires."""
        return {*self._moving}

    def change(self, rule: int, row: int) -> Change | None:
        return self._moving[rule].changes.get(row) if rule in self._moving else None

    def before(self, rule: int, row: int) -> Standing:
        return self._moving[rule].before(row) if rule in self._moving else _QUIET

    def keep(self) -> None:
        """Write the results to the tracks."""
        for track, step in self._judged:
            track.judged_step, track.streak = step, None
        for track, left in self._left:
            track.left_step = left
        for place, course in self._moving.items():
            self._tracks[place] = course.track
        for place, is_held_back in self._held_back.items():
            self._tracks[place].is_held_back = is_held_back


def _course(
    rule: Rule, track: Track, verdicts: Sequence[Verdict], clear: Sequence[bool | None] | None, span: Span
) -> Course:
    streak = None if track.streak is None else replace(track.streak)
    course = Course(replace(track, streak=streak), _standing(track))
    for row, (verdict, step) in enumerate(zip(verdicts, span.steps, strict=True), span.start):
        if clear is not None and course.track.state == "quiet":
            course.track.left_step = left_after(course.track.left_step, [clear[row - span.start]], [step])
        change = advance(rule, course.track, verdict, step)
        if change is not None:
            course.changes[row] = change
            course.standings.append((row, _standing(course.track)))
    return course


def _standing(track: Track) -> Standing:
    return Standing(track.state, track.pending_step, track.firing_step, track.left_step)


def _verdicts(
    compiled: Compiled, answers: Sequence[bool | None], span: Span, state: State, batch: Batch
) -> list[Verdict]:
    rows = slice(span.start, span.stop)
    if compiled.clear is None:
        verdicts = [_VERDICTS[answer] for answer in answers]
    else:
        clear = batch[compiled.clear.index][rows]
        verdicts = [
            "met" if answer else "clear" if is_clear else "unknown" if answer is None else "between"
            for answer, is_clear in zip(answers, clear, strict=True)
        ]
    if compiled.only_while is not None:
        guard = batch[compiled.only_while.index][rows]
        verdicts = ["between" if holds is False else said for said, holds in zip(verdicts, guard, strict=True)]
    early = min(_num_early(compiled.rule.after, span, state), len(verdicts))
    verdicts[:early] = ["unknown" if said == "unknown" else "between" for said in verdicts[:early]]
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
