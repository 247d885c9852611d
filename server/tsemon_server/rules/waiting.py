"""The samples and steps without which the condition of a rule cannot be met yet."""

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
    """Counts the samples that the memories of a program still need, in each stack of a model."""

    def __init__(self, program: Program, state: State) -> None:
        self._state = state
        self._of_stacks = [_missing(program, one.cells) for one in (state, *state.others)]

    def of(self, compiled: Compiled) -> str:
        """Describe the samples and steps that must come before the condition can be met; empty if the next sample can.

        A metric that the run does not have counts as if it came with the next sample. Negations, `held`, `steps_in` and
        `measured` count as if they could be met at any time.
        """
        state, after, missing = self._state, compiled.rule.after, self._missing(compiled)
        num_early = after.samples - state.num_samples + 1
        num_steps = 0 if state.first_step is None or state.last_step is None else state.last_step - state.first_step
        parts = []
        if num_early > max(missing.num_samples, 1):
            parts.append(f"{num_early} more samples")
        elif missing.num_samples > 1:
            parts.append(f"{missing.num_samples} more samples{_with(missing.measures)}")
        if after.steps - num_steps > 1:
            parts.append(f"{after.steps - num_steps} more steps")
        return " and ".join(parts)

    def of_unknown(self, compiled: Compiled) -> str:
        """Describe the same of a rule that was never evaluated. Empty only before the first sample."""
        text, missing = self.of(compiled), self._missing(compiled)
        if text or not self._state.num_samples:
            return text
        if missing.num_samples:
            return f"1 more sample{_with(missing.measures)}"
        return f"1 more sample{_with(compiled.when.measures)} whose values are all defined"

    def _missing(self, compiled: Compiled) -> _Missing:
        return _fewest(stack[compiled.when.index] for stack in self._of_stacks)


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
