"""The samples and steps without which a rule cannot fire yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tsemon_server.rules.memory import Cell, Memory
from tsemon_server.rules.program import Measure, Needs, Program, Term
from tsemon_server.rules.rule import Compiled
from tsemon_server.rules.state import State


class _Missing(NamedTuple):
    """A number of samples that must still come, with these measures."""

    num_samples: int
    measures: frozenset[Measure] = frozenset()


class Waiting:
    """Counts the samples and steps that rules still need, in each stack of a model."""

    def __init__(self, program: Program, state: State, fresh: State) -> None:
        self._state = state
        self._of_stacks = [_missing(program, one.cells) for one in (state, *state.others)]
        self._of_fresh = _missing(program, fresh.cells)

    def of(self, compiled: Compiled, *, is_unknown: bool = False) -> str:
        """Describe the samples and steps that must come before the rule can fire; empty if enough of them have come.

        The samples of a hold count from the first one that could have met the condition, whether it did or not, but its
        steps from the first sample of the attempt, as nothing remembers at which step the other one came.
        A metric that the run does not have counts as if it came with the next sample. Negations, `held`, `steps_in` and
        `measured` count as if they could be met at any time. `only_while` counts for nothing: an unknown
        guard does not block a rule. `is_unknown`: the rule was never evaluated.
        """
        state, hold, after = self._state, compiled.rule.hold, compiled.rule.after
        missing = _fewest(stack[compiled.when.index] for stack in self._of_stacks)
        num_steps = 0 if state.first_step is None or state.last_step is None else state.last_step - state.first_step
        first = max(self._of_fresh[compiled.when.index].num_samples, after.samples + 1)
        num_samples, what = first + hold.samples - 1 - state.num_samples, ""
        steps = after.steps + hold.steps - num_steps
        if is_unknown or missing.num_samples or num_steps < after.steps:  # the hold cannot have begun
            least = max(missing.num_samples, 1) + hold.samples - 1
            if least >= num_samples:
                num_samples, what = least, _with(missing.measures)
                if is_unknown and state.num_samples and not missing.num_samples:
                    what = f"{_with(compiled.when.measures)} whose values are all defined"
            steps = max(steps, hold.steps)
        if not state.num_samples and num_samples == 1:
            num_samples = 0  # every rule needs a first sample
        counts = (num_samples, "sample", what), (steps, "step", "")
        return " and ".join(f"{num} more {unit}{'s' * (num > 1)}{which}" for num, unit, which in counts if num > 0)


def _missing(program: Program, cells: Sequence[Sequence[Cell]]) -> list[_Missing]:
    """For each node."""
    found = list[_Missing]()
    places = {index: place for place, index in enumerate(program.memories)}
    for index, (node, term) in enumerate(zip(program.nodes, program.terms, strict=True)):
        missing = _joined([found[read] for read in node.reads], node.needs)
        if index in places:
            missing = _remembered(program.memories[index], cells[places[index]], missing, term)
        found.append(missing)
    return found


def _joined(each: Sequence[_Missing], needs: Needs) -> _Missing:
    if not each or needs == "none":
        return _Missing(0)
    return _fewest(each) if needs == "one" else max(each, key=lambda one: one.num_samples)


def _fewest(each: Iterable[_Missing]) -> _Missing:
    """The least of several; without measures if these differ."""
    found = [*each]
    measures = {one.measures for one in found}
    return _Missing(min(one.num_samples for one in found), measures.pop() if len(measures) == 1 else frozenset())


def _remembered(memory: Memory, cells: Sequence[Cell], below: _Missing, term: Term) -> _Missing:
    each = [memory.num_missing(cell) for cell in cells or [[]]]
    if None in each:
        return _Missing(0)
    lacks = min(number for number in each if number is not None)
    # The sample that brings the first value to remember is the first of those that this memory lacks.
    return _Missing(max(below.num_samples - 1, 0) + lacks, term.measures) if lacks else below


def _with(measures: Iterable[Measure]) -> str:
    *names, last = sorted({measure.name for measure in measures}) or [""]
    return f" with {', '.join(names)} and {last}" if names else f" with {last}" if last else ""
