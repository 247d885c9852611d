"""How well do the built-in rules tell failing trainings from healthy ones, and how near do their thresholds come to either?

    python benchmarks/calibration.py [FOLDER ...] [--margins] [--without-a-family]

FOLDER holds recorded trainings (docs/replay.md); by default it is `tests/data/traces`. Prints the tables of
docs/alerts.md: the score of each family, and the score with other holds and with fewer samples. With `--margins`, in a few
minutes: how far each bound may move, alone, before a healthy run alarms or a failing one is lost to the rule. With
`--without-a-family`: what bounds chosen without the runs of a family find of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from recorded import Recorded, read_all
from trials.judging import Summary, Verdict, judge_replayed

from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.grammar import value
from tsemon_server.rules.parts import Part
from tsemon_server.rules.program import Program, View
from tsemon_server.rules.rule import Rule
from tsemon_server.services.replay.recording import Attempt
from tsemon_server.services.replay.replaying import replay

TRACES = Path(__file__).parents[1] / "tests/data/traces"
FARTHEST = 1e4
"""Bounds are not moved by more than this factor."""
GENTLE = 3.0
"""Where no failing run says how far a bound may go, it is chosen this factor off the nearest healthy one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[TRACES], metavar="FOLDER")
    parser.add_argument("--margins", action="store_true")
    parser.add_argument("--without-a-family", action="store_true")
    options = parser.parse_args()
    runs = [run for folder in options.folders for run in read_all(folder)]
    rules = [rule for rule in PACK if rule.on == "frame"]
    print_score(rules, runs)
    if any(run.is_failing for run in runs):
        print_changes(rules, runs)
    if options.margins or options.without_a_family:
        bounds = [bound for rule in rules if rule.severity != "info" for bound in measured_bounds(rule, runs)]
        if options.margins:
            print_margins(bounds)
        if options.without_a_family:
            print_without_a_family(rules, bounds, runs)


# Scores


class Frames(NamedTuple):
    """Frames of a run, to be replayed."""

    name: str
    views: Iterable[View]
    problems: Sequence[str] = ()

    def attempts(self, own: Collection[str] = ()) -> Iterator[Attempt]:
        yield Attempt(0, iter(self.views))


Thin = Callable[[Recorded], Iterable[View]]


def verdicts(rules: Sequence[Rule], runs: Sequence[Recorded], views: Thin = lambda run: run.views) -> list[Verdict]:
    losses, evaluator = {run.name: run.losses for run in runs}, Evaluator(rules)
    return [
        judge_replayed(run, run.losses, losses.get(run.twin), replay(Frames(run.name, views(run)), evaluator))
        for run in runs
        if not run.is_gray
    ]


def print_score(rules: Sequence[Rule], runs: Sequence[Recorded]) -> None:
    judged = verdicts(rules, runs)
    harmed = [v for v in judged if v.is_harmed]
    _print_false(judged)
    if not harmed:
        return
    print(
        "\n| family | runs | recall | right family | loss rules' recall | lead over accidents | and plateaus | delay |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for family in (*sorted({v.trial.family for v in harmed}), "all"):
        s = Summary.of([v for v in harmed if family in (v.trial.family, "all")])
        print(
            f"| {family} | {s.num_runs} | {s.recall:.2f} | {s.named:.2f} | {s.standstill_recall:.2f} | "
            f"{s.lead_over_accident:.0f} | {s.lead_over_standstill:.0f} | {s.delay:+.0f} |"
        )


def _print_false(judged: Sequence[Verdict]) -> None:
    healthy = [v for v in judged if not v.trial.is_failing]
    print(f"\nfalse alarms in {sum(bool(v.false) for v in healthy)} of {len(healthy)} healthy runs")
    for v in judged:
        if v.false:
            print(f"  {v.trial.name}: " + ", ".join(f"{alarm.rule} at step {alarm.step}" for alarm in v.false[:4]))


def print_changes(rules: Sequence[Rule], runs: Sequence[Recorded]) -> None:
    print("\n| change | recall | right family | false alarms | lead over accidents and plateaus | delay |")
    print("|---|---|---|---|---|---|")
    for factor in (1.0, 0.5, 2.0):
        _print_change(f"holds times {factor:g}", [verdicts([with_hold(rule, factor) for rule in rules], runs)])
    for every in (2, 4):
        thinned = [verdicts(rules, runs, lambda run, p=p, n=every: run.thinned(n, p)) for p in range(every)]
        _print_change(f"one sample in {every}, from each of the first {every}", thinned)


def _print_change(title: str, trials: Sequence[Sequence[Verdict]]) -> None:
    together = [v for judged in trials for v in judged]
    s = Summary.of([v for v in together if v.is_harmed])
    num_false = sum(bool(v.false) for v in together)
    print(
        f"| {title} | {s.recall:.3f} | {s.named:.3f} | {num_false} of {len(together)} | "
        f"{s.lead_over_standstill:.0f} | {s.delay:+.0f} |"
    )


def with_hold(rule: Rule, factor: float) -> Rule:
    data = copy.deepcopy(dict(rule.tree))
    data["for"] = {
        "samples": max(1, round(rule.hold.samples * factor)),
        "steps": round(rule.hold.steps * factor),
    }
    return read(data)


def read(data: Mapping[str, Any]) -> Rule:
    (rule,) = load(json.dumps({"rules": [data]}))
    return rule


# Bounds


class Limit(NamedTuple):
    """How far a bound may move, and the run that decides."""

    factor: float
    run: str


NOWHERE = Limit(math.inf, "")


@dataclass(frozen=True)
class Bound:
    """A number in the condition of a rule."""

    rule: Rule
    path: tuple[str | int, ...]
    """Where it stands in the definition."""
    healthy: Limit
    """By which factor it must be made gentler for a healthy run to alarm (or a failing one, before its defect)."""
    failing: Mapping[str, Limit]
    """By family, by which factor it must be made stricter for the rule to lose a run that it calls."""
    num_called: int

    @cached_property
    def value(self) -> float:
        return float(at(self.rule.tree, self.path))

    def moved(self, factor: float) -> float:
        """Gentler by a factor of more than 1. A share of one half or more moves by what it leaves to one."""
        is_upper = self.path[-1] in ("above", "at_least")
        size = abs(self.value)
        is_share = 0.5 <= size < 1
        shrinks = is_upper == (self.value > 0)
        if is_share:
            size = 1 - min((1 - size) * (factor if shrinks else 1 / factor), 1)
        else:
            size = size / factor if shrinks else size * factor
        return math.copysign(size, self.value)

    def with_factor(self, factor: float) -> Rule:
        return read(replaced(self.rule.tree, {self.path: self.moved(factor)}))


def measured_bounds(rule: Rule, runs: Sequence[Recorded]) -> Iterator[Bound]:
    called = [run for run in runs if run.is_failing and is_called(rule, run)]
    quiet = [run for run in runs if not run.is_gray and (not run.is_failing or run.event_step)]
    for path in bounds_in(rule.tree["when"], ("when",)):
        bound = Bound(rule, path, NOWHERE, {}, len(called))
        failing = {
            family: stricter_until_lost(bound, [run for run in called if run.family == family])
            for family in {run.family for run in called}
        }
        yield replace(bound, healthy=gentler_until_false(bound, quiet), failing=failing)


def gentler_until_false(bound: Bound, runs: Sequence[Recorded]) -> Limit:
    return nearest(lambda factor: first(is_false, bound.with_factor(factor), runs))


def stricter_until_lost(bound: Bound, runs: Sequence[Recorded]) -> Limit:
    return nearest(lambda factor: first(is_lost, bound.with_factor(1 / factor), runs))


def first(question: Callable[[Rule, Recorded], bool], rule: Rule, runs: Sequence[Recorded]) -> str | None:
    """The name of the first run of which it is true."""
    return next((run.name for run in runs if question(rule, run)), None)


def firing_steps(rule: Rule, run: Recorded) -> list[int]:
    """The steps at which its alerts fired."""
    evaluator = Evaluator([rule])
    (events,) = evaluator.read([(evaluator.start(), run.views)])
    return [event.firing_step or 0 for event in events if event.kind == "firing"]


def is_false(rule: Rule, run: Recorded) -> bool:
    return any(not run.is_failing or step < run.event_step for step in firing_steps(rule, run))


def is_called(rule: Rule, run: Recorded) -> bool:
    return any(step >= run.event_step for step in firing_steps(rule, run))


def is_lost(rule: Rule, run: Recorded) -> bool:
    return not is_called(rule, run)


def nearest(named: Callable[[float], str | None]) -> Limit:
    """The smallest factor, to 2 %, for which a run is named."""
    high, name = FARTHEST, named(FARTHEST)
    if name is None:
        return NOWHERE
    low = 1.0
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        found = named(middle)
        if found is None:
            low = middle
        else:
            high, name = middle, found
    return Limit(high, name)


def bounds_in(data: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Where numbers stand to which something is compared. Bounds of 0 are definitions, no thresholds."""
    if isinstance(data, list):
        for place, item in enumerate(data):
            yield from bounds_in(item, (*path, place))
    elif isinstance(data, dict):
        for key, item in data.items():
            if key in ("above", "below", "at_least", "at_most") and isinstance(item, int | float) and item:
                yield (*path, key)
            else:
                yield from bounds_in(item, (*path, key))


def at(data: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        data = data[key]
    return data


def replaced(data: Mapping[str, Any], numbers: Mapping[tuple[str | int, ...], float]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(data))
    for path, number in numbers.items():
        at(changed, path[:-1])[path[-1]] = number
    return changed


def print_margins(bounds: Sequence[Bound]) -> None:
    print("\n| rule | bound | a healthy run alarms from | a failing run is lost from | runs found |")
    print("|---|---|---|---|---|")
    for bound in bounds:
        mild = min(bound.failing.values(), default=NOWHERE)
        print(
            f"| `{bound.rule.name}` | {says(bound)} | {_moved(bound, bound.healthy.factor, bound.healthy.run)} | "
            f"{_moved(bound, 1 / mild.factor, mild.run)} | {bound.num_called} |"
        )


def says(bound: Bound) -> str:
    comparison = at(bound.rule.tree, bound.path[:-1])
    seen = value(Part(comparison["value"]), Program()).says
    return f"{seen} {str(bound.path[-1]).replace('_', ' ')} {bound.value:g}".replace("|", "\\|")


def _moved(bound: Bound, factor: float, name: str) -> str:
    return f"{bound.moved(factor):.2g} ({name})" if 0 < factor < math.inf else "-"


# Without a family


def print_without_a_family(rules: Sequence[Rule], bounds: Sequence[Bound], runs: Sequence[Recorded]) -> None:
    print("\n| left out | runs | recall | right family | false alarms in healthy runs |")
    print("|---|---|---|---|---|")
    for family in sorted({run.family for run in runs if run.is_failing}):
        chosen = [rechosen(rule, [b for b in bounds if b.rule is rule], family) for rule in rules]
        judged = verdicts(chosen, runs)
        left = [v for v in judged if v.is_harmed and v.trial.family == family]
        healthy = [v for v in judged if not v.trial.is_failing]
        s = Summary.of(left)
        num_false = sum(bool(v.false) for v in healthy)
        print(f"| {family} | {s.num_runs} | {s.recall:.2f} | {s.named:.2f} | {num_false} of {len(healthy)} |")


def rechosen(rule: Rule, bounds: Sequence[Bound], without: str) -> Rule:
    """Each bound half way, in logarithms, between health and the mildest failing run that is not of the family."""
    return read(replaced(rule.tree, {bound.path: bound.moved(_choice(bound, without)) for bound in bounds}))


def _choice(bound: Bound, without: str) -> float:
    strictest = min((limit for family, limit in bound.failing.items() if family != without), default=NOWHERE)
    if bound.healthy == NOWHERE:
        return 1.0
    return bound.healthy.factor / GENTLE if strictest == NOWHERE else math.sqrt(bound.healthy.factor / strictest.factor)


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
