"""Limits on the cost of rules, so that the rules of one project cannot slow down the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tsemon.errors import InvalidRules
from tsemon_server.rules.costs import RULE_US, SHOWN, Cost, Priced, change_us
from tsemon_server.rules.parts import Mistake, Path
from tsemon_server.rules.program import Program
from tsemon_server.rules.rule import Compiled, Rule, compile_rule, shown_numbers

MOST_OF_ONE = Cost(frame_us=500, memory_bytes=2**19, change_us=1_000)
"""Limits for one rule."""
MOST_OF_ALL = Cost(frame_us=1_600, memory_bytes=2**20, change_us=6_000)
"""Limits for a project's own rules together, for the rules that were added to the server, and for a file."""
MAX_RULES = int(MOST_OF_ALL.change_us / change_us(1, 0, 0, 0))
"""Maximum number of rules in a file: more rules exceed the limits in any case."""


class _Bound(NamedTuple):
    """One of the numbers of a cost."""

    name: str
    what: str
    shown: Callable[[float], str]


def _in_ms(us: float) -> str:
    return f"{us / 1e3:.3g} ms"


_BOUNDS = (
    _Bound("frame_us", "CPU time for each frame", _in_ms),
    _Bound("memory_bytes", "memory for each attempt", lambda size: f"{size / 2**20:.3g} MiB"),
    _Bound("change_us", "CPU time for a frame at which its alerts change", _in_ms),
)


def cost_of(rules: Iterable[Rule]) -> Cost:
    """Estimate the cost of rules together. A part that several rules share counts once."""
    each = [_Measured(rules, on) for on in ("frame", "clock")]
    return Cost(
        sum(one.cost.frame_us for one in each),
        sum(one.cost.memory_bytes for one in each),
        sum(one.cost.change_us for one in each),
    )


class _Measured:
    """Rules that are compiled together, and their cost."""

    def __init__(self, rules: Iterable[Rule], on: str) -> None:
        program = Program()
        compiled = [compile_rule(rule, program) for rule in rules if rule.on == on]
        for one in compiled:
            shown_numbers(one, program)
        needed = program.needed_for(term for one in compiled for term in one.terms)
        self.parts = program.priced(needed)
        where = program.priced({*range(len(program.nodes))} - needed)
        works = [*(part.work for part in self.parts), *[SHOWN] * len(program.shown)]
        self.cost = Cost(
            sum(work.us for work in works) + RULE_US * len(compiled),
            sum(work.memory_bytes for work in works),
            sum(map(_change_us, compiled)) + sum(part.work.us for part in where),
        )


def _change_us(compiled: Compiled) -> float:
    num_arrays = sum(comparison.value.axes > 0 for comparison in compiled.comparisons)
    num_numbers = len(compiled.comparisons) - num_arrays + len(compiled.evidence)
    num_profiles = sum(measure.kind != "scalar" for measure in compiled.measures)
    advice = compiled.rule.advice
    return change_us(num_numbers, num_arrays, num_profiles, advice.count("{") + advice.count(". "))


def check_one(rule: Rule, path: Path = ()) -> None:
    """Raises Mistake if the rule costs too much by itself."""
    measured = _Measured([rule], rule.on)
    for bound in _BOUNDS:
        cost, most = getattr(measured.cost, bound.name), getattr(MOST_OF_ONE, bound.name)
        if cost > most:
            told = f"this rule needs an estimated {bound.shown(cost)} of {bound.what}, and may need {bound.shown(most)}"
            raise Mistake((*path, "when"), f"{told}; {_hint(bound, measured.parts)}")


def _hint(bound: _Bound, parts: Sequence[Priced]) -> str:
    """Say which part costs most, and what to do."""
    if bound.name == "change_us":
        return "compare fewer values, or show fewer of them as evidence"
    dearest = max(parts, key=lambda part: float(getattr(part.work, bound.name.removeprefix("frame_"))))
    cost = bound.shown(getattr(dearest.work, bound.name.removeprefix("frame_")))
    says = dearest.says if len(dearest.says) <= 200 else f"{dearest.says[:197]}..."
    told = f"the most expensive part is '{says}' ({cost})"
    if dearest.work.num_cells > 1:
        return f"{told}. Use fewer samples, or look back at one number, such as the max of layers or heads"
    if dearest.work.num_numbers > 0:
        return f"{told}. Use fewer samples, or fewer functions over time"
    return f"{told}. Use fewer or simpler values, or several rules"


def check_all(rules: Sequence[Rule], whose: str, before: Callable[[], Sequence[Rule]] = tuple) -> None:
    """Raises InvalidRules if rules cost too much together, unless the rules `before` an edit cost at least as much."""
    cost = cost_of(rules)
    for bound in _BOUNDS:
        found, most = getattr(cost, bound.name), getattr(MOST_OF_ALL, bound.name)
        if found > most and found > getattr(cost_of(before()), bound.name):
            each = [(float(getattr(cost_of([rule]), bound.name)), rule.name) for rule in rules]
            dearest, name = max(each)
            told = f"{whose} need an estimated {bound.shown(found)} of {bound.what}, and may need {bound.shown(most)}"
            rest = f"the most expensive of the {len(rules)} is {name} ({bound.shown(dearest)})"
            raise InvalidRules(f"{told}; {rest}. Make rules cheaper, or remove some")
