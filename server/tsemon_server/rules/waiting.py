"""The samples and steps without which a rule cannot fire yet."""

from __future__ import annotations

from typing import NamedTuple

from tsemon_server.rules.program import Measure, Program
from tsemon_server.rules.rule import Compiled
from tsemon_server.rules.state import State


class _Missing(NamedTuple):
    """A number of samples that must still come, with these measures."""

    num_samples: int
    measures: frozenset[Measure] = frozenset()


class Waiting:
    """Counts the samples that the memories of a program still need after those of `state`."""

    def __init__(self, program: Program, state: State) -> None:
        self._state = state
        self._missing = list[_Missing]()
        cells = dict(zip(program.memories, state.cells, strict=False))
        for index, (node, term) in enumerate(zip(program.nodes, program.terms, strict=True)):
            choose = min if index in program.choices else max
            each = (self._missing[read] for read in node.reads)
            missing = choose(each, key=lambda one: one.num_samples, default=_Missing(0))
            if index in cells:
                memory = program.memories[index]
                lacks = min((memory.num_missing(cell) for cell in cells[index]), default=memory.num_missing([]))
                if lacks:  # the sample that brings the first number to remember is the first of these
                    missing = _Missing(max(missing.num_samples - 1, 0) + lacks, term.measures)
            self._missing.append(missing)

    def of(self, compiled: Compiled) -> str:
        """Return what must come before the rule can fire, in words. Empty if it can fire at the next sample.

        A metric that the run does not have counts as if it came with the next sample.
        """
        state, after = self._state, compiled.rule.after
        missing = self._missing[compiled.when.index]
        num_early = after.samples - state.num_samples + 1
        num_steps = 0 if state.first_step is None or state.last_step is None else state.last_step - state.first_step
        parts = []
        if num_early > max(missing.num_samples, 1):
            parts.append(f"{num_early} more samples")
        elif missing.num_samples > 1:
            names = " and ".join(sorted({measure.name for measure in missing.measures}))
            parts.append(f"{missing.num_samples} more samples with {names}")
        if after.steps > num_steps:
            parts.append(f"{after.steps - num_steps} more steps")
        return " and ".join(parts)
