"""The next frames of several attempts, read together, with separate rows for each stack of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tsemon_server.rules.engine import Change
from tsemon_server.rules.plan import Batch, Row
from tsemon_server.rules.program import View
from tsemon_server.rules.remembering import Span
from tsemon_server.rules.state import State
from tsemon_server.rules.tracking import Courses, Standing


class Reading:
    """The rows of one stack of an attempt."""

    courses: Courses
    """The alerts of all rules, once the columns are there."""

    def __init__(self, state: State, span: Span, views: Sequence[View], frames: Sequence[int]) -> None:
        self.state = state
        self.span = span
        self.views = views
        self.frames = frames
        """The number of each row's frame in the attempt."""

    def keep(self, batch: Batch) -> None:
        """Write the results to the state."""
        self.state.cells = batch.cells_after(self.span)
        self.courses.keep()
        if self.state.first_step is None:
            self.state.first_step = self.views[0].step
        self.state.last_step = self.views[-1].step
        self.state.num_samples += len(self.views)


class Look:
    """A frame as the rules see it in one stack, or the whole frame if there is one stack."""

    def __init__(self, reading: Reading, frame: int, batch: Batch) -> None:
        place = reading.frames.index(frame)
        self.view = reading.views[place]
        self.span = reading.span
        self.row = reading.span.start + place
        self.values = Row(batch, self.row)
        self._courses = reading.courses

    def change(self, rule: int) -> Change | None:
        return self._courses.change(rule, self.row)

    def before(self, rule: int) -> Standing:
        return self._courses.before(rule, self.row)

    def after(self, rule: int) -> Standing:
        return self._courses.before(rule, self.row + 1)


class Attempt:
    """Frames of one attempt, in the order of steps."""

    def __init__(self, state: State, frames: Sequence[View], start: Callable[[], State], first_row: int) -> None:
        self.frames = frames
        self._state = state
        stacks: list[tuple[list[View], list[int]]] = []
        for number, frame in enumerate(frames):
            for stack, view in enumerate(frame.of_stacks()):
                if stack == len(stacks):
                    stacks.append(([], []))
                stacks[stack][0].append(view)
                stacks[stack][1].append(number)
        states = [state, *state.others]
        states += [start() for _ in range(len(stacks) - len(states))]
        self._others = states[1:]
        self.readings: list[Reading] = []
        for (views, numbers), own in zip(stacks, states, strict=False):
            span = Span(first_row, [view.step for view in views], own.cells)
            self.readings.append(Reading(own, span, views, numbers))
            first_row = span.stop

    def changed_frames(self) -> list[int]:
        """Those at which the state of an alert changed in some stack."""
        return sorted(
            {
                reading.frames[row - reading.span.start]
                for reading in self.readings
                for row in reading.courses.changed_rows()
            }
        )

    def moving(self) -> list[int]:
        """The places of rules whose alerts are or were not quiet in some stack; no other changes or fires."""
        return sorted({place for reading in self.readings for place in reading.courses.moving()})

    def looks(self, frame: int, batch: Batch) -> list[Look]:
        """One per stack that the frame has."""
        return [Look(reading, frame, batch) for reading in self.readings if frame in reading.frames]

    def keep(self, batch: Batch) -> None:
        """Write the results to the states."""
        self._state.others = self._others
        for reading in self.readings:
            reading.keep(batch)


def attempts_of(each: Sequence[tuple[State, Sequence[View]]], start: Callable[[], State]) -> list[Attempt]:
    """Their rows follow each other in this order; `start` gives the state of a stack that was not there yet."""
    attempts, first_row = list[Attempt](), 0
    for state, views in each:
        attempt = Attempt(state, _rising(views, state.last_step), start, first_row)
        first_row = attempt.readings[-1].span.stop if attempt.readings else first_row
        attempts.append(attempt)
    return attempts


def _rising(views: Sequence[View], last_step: int | None) -> list[View]:
    """Without frames whose step is not after the one before."""
    rising = []
    for view in views:
        if last_step is None or view.step > last_step:
            rising.append(view)
            last_step = view.step
    return rising
