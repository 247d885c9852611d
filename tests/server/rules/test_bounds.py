"""What rules may cost: what is refused, and what an accepted rule may do and remember at most."""

import json
import re
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tsemon.errors import InvalidRules
from tsemon_server.rules import PACK
from tsemon_server.rules.bounds import MOST_OF_ALL, MOST_OF_ONE, check_one, cost_of
from tsemon_server.rules.checking import mistakes
from tsemon_server.rules.costs import BLOCKS, HEADS, SHOWN
from tsemon_server.rules.documents import load, stored
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.memory import (
    OVER_TIME,
    Best,
    HowOften,
    Previous,
    Start,
    StepsAgo,
    StepsIn,
    StepsSince,
    Window,
    ZScore,
)
from tsemon_server.rules.parts import Mistake, Part
from tsemon_server.rules.program import Program, View
from tsemon_server.rules.rule import compile_rule, rule, shown_numbers

from .test_batches import CONDITIONS, LAYERS, SCALARS, few_samples
from .test_batches import HEADS as NAMES_OF_HEADS
from .test_printing import values

PAGE = (Path(__file__).parents[3] / "docs/rules.md").read_text()
CALLS_A_US = 4
"""Calls of functions for each estimated microsecond. Most cost more than a quarter of one."""
CALLS = 400
"""Of a frame without rules, and more than enough for its views."""


def one(when, name="mine", **fields):
    return stored({"name": name, "when": when, **fields}, "test")


def refused(when, **fields):
    with pytest.raises(Mistake) as error:
        check_one(one(when, **fields))
    return str(error.value)


def whole_frames(num_frames, seed=0):
    """Frames of a model of the size that estimates are for, with all metrics; some values are NaN."""
    draw = np.random.default_rng(seed)

    def array(*shape):
        found = draw.normal(size=shape).astype(np.float32)
        found[draw.random(shape) < 0.1] = np.nan
        return found

    return [
        View(
            10 * number,
            {name: float(draw.normal()) for name in SCALARS},
            {name: array(BLOCKS + 1) for name in LAYERS},
            {name: array(BLOCKS, HEADS) for name in NAMES_OF_HEADS},
            stacks=None,
        )
        for number in range(num_frames)
    ]


FRAMES = whole_frames(12)


def num_calls(work):
    """The number of functions that are called, whether written in Python or C."""
    found = 0

    def count(frame, event, called):
        nonlocal found
        found += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def works(rules):
    program = Program()
    compiled = [compile_rule(each, program) for each in rules]
    for each in compiled:
        shown_numbers(each, program)
    needed = program.needed_for(term for each in compiled for term in each.terms)
    return [*(part.work for part in program.priced(needed)), *[SHOWN] * len(program.shown)]


class TestAnAcceptedRule:
    @settings(max_examples=60, deadline=None)
    @given(CONDITIONS, CONDITIONS, few_samples(values(0)))
    def test_does_and_remembers_at_most_what_was_estimated(self, when, clear, seen):
        at_once = {"for": {"samples": 1}, "clear_for": {"samples": 1}}
        rules = [one(when, clear=clear, evidence={"seen": seen}, **at_once)]
        try:
            check_one(rules[0])
        except Mistake:
            assume(False)
        cost, evaluator = cost_of(rules), Evaluator(rules)
        state = evaluator.start()
        calls = 0
        for view in FRAMES:
            calls += num_calls(lambda view=view: evaluator.advance(state, view))
            cells = [cell for held in state.cells for cell in held]
            assert len(cells) <= sum(work.num_cells for work in works(rules))
            assert sum(map(len, cells)) <= sum(work.num_numbers for work in works(rules))
        # Not of each frame: a statistic of the first samples is computed once.
        assert calls <= len(FRAMES) * (CALLS + CALLS_A_US * (cost.frame_us + cost.change_us))

    @pytest.mark.parametrize(
        "memory",
        [
            *[Window(take, 5) for take in OVER_TIME.values()],
            *[Best(is_lowest=True), ZScore(5), Previous(5), StepsAgo(5), StepsSince(is_lowest=True, by_ratio=0.1)],
            *[StepsIn(), HowOften(5)],
        ],
    )
    def test_remembers_in_each_cell_as_many_numbers_as_was_estimated(self, memory):
        cell = []
        for step in range(12):
            _, cell = memory.read(
                cell, [True if isinstance(memory, StepsIn | HowOften) else float(step)], [float(step)]
            )
        assert len(cell) == memory.num_kept

    def test_remembers_of_its_start_no_more_than_its_samples(self):
        memory, cell, most = Start(OVER_TIME["median"], 5), [], 0
        for step in range(12):
            _, cell = memory.read(cell, [float(step)], [float(step)])
            most = max(most, len(cell))
        assert most <= memory.num_kept

    @pytest.mark.parametrize(
        "value",
        [*(f"{name}(loss, samples=1000)" for name in OVER_TIME), "z_score(loss, 1000)", "previous(loss, 1000)"],
    )
    def test_calls_few_functions_for_each_sample_of_a_long_window(self, value):
        rules = [one(f"{value} > 1e9")]
        evaluator = Evaluator(rules)
        state = evaluator.start()
        evaluator.read([(state, [View(step, {"loss": step % 7.0}) for step in range(1001)])])
        calls = num_calls(lambda: evaluator.advance(state, View(10**6, {"loss": 3.0})))
        assert calls <= CALLS + CALLS_A_US * 1000


class TestRulesThatAreAccepted:
    def test_are_the_built_in_ones_with_room_to_spare(self):
        for built_in in PACK:
            check_one(built_in)
        for found, most in zip(cost_of(PACK), MOST_OF_ALL, strict=True):
            assert found <= 0.95 * most
        for built_in in PACK:
            assert all(found <= 0.3 * most for found, most in zip(cost_of([built_in]), MOST_OF_ONE, strict=True))

    def test_are_the_examples_of_the_page(self):
        (file,) = re.findall(r"<!-- rules:start -->\n```yaml\n(.*?)```\n<!-- rules:end -->", PAGE, re.DOTALL)
        found = cost_of(load(file))
        assert all(cost <= 0.3 * most for cost, most in zip(found, MOST_OF_ALL, strict=True))

    @pytest.mark.parametrize(
        "when",
        [
            "any(grad_norm > 10 * median(grad_norm, samples=50))",
            "any(z_score(grad_norm, 30) > 6)",
            "any(slope(token_diversity, samples=20) < 0)",
            "median(loss, samples=1000) > 3 or slope(loss, samples=1000) > 0",
            'any(mean(heads("attention_entropy")) < 0.1)',
            'any(min(heads("attention_entropy")) < 0.5 * highest(min(heads("attention_entropy"))))',
            "held(loss > 3, 600, of=1000)",
        ],
    )
    def test_look_at_all_layers_and_far_back(self, when):
        check_one(one(when))


class TestARuleThatCostsTooMuch:
    def test_is_told_its_cost_the_limit_its_dearest_part_and_what_to_do(self):
        told = refused("loss > 3 and any(median(grad_norm, samples=1000) > 1)")
        assert told == (
            "this rule needs an estimated 3.47 ms of CPU time for each frame, and may need 0.5 ms; the most expensive part "
            "is 'median of the last 1000 samples of grad_norm' (3.44 ms). Use fewer samples, or look back at one number, "
            "such as the max of layers or heads"
        )

    @pytest.mark.parametrize(
        ("when", "what"),
        [
            ("any(previous(grad_norm, 500) > 1)", "0.753 MiB of memory for each attempt, and may need 0.5 MiB"),
            ("any(start(grad_norm, 180) > 1)", "MiB of memory for each attempt"),
            ('any(min(lowest(heads("h"))) > 1)', "of CPU time for each frame"),
            ('any(median(median(heads("h"), samples=10)) > 1)', "of CPU time for each frame"),
            ("any(slope(slope(slope(grad_norm, samples=20), samples=20), samples=20) > 1)", "CPU time for each frame"),
            ("any(z_score(grad_norm, 1000) > 1)", "CPU time for each frame"),
            (" or ".join(f"median(loss + {n}, samples=300) > 1" for n in range(40)), "CPU time for each frame"),
            (" or ".join(f"any(grad_norm + {n} > loss)" for n in range(90)), "CPU time for each frame"),
        ],
    )
    def test_is_refused(self, when, what):
        assert what in refused(when)

    def test_is_refused_for_all_that_it_shows(self):
        many = " or ".join(f"any({name} > 1e9)" for name in ("grad_norm", "param_norm", "update_norm"))
        assert "a frame at which its alerts change" in refused(many, advice="It is {x}. " * 300, evidence={"x": "loss"})

    def test_may_cost_it_in_any_of_its_keys(self):
        dear = "max(median(grad_norm, samples=1000))"
        for fields in ({"clear": f"{dear} < 1"}, {"only_while": f"{dear} < 1"}, {"evidence": {"x": dear}}):
            assert "median of the last 1000 samples of grad_norm" in refused("loss > 1", **fields)

    def test_is_refused_in_a_file_with_its_line(self):
        fine, dear = "{name: fine, when: loss > 3}", "{name: dear, when: 'any(median(grad_norm, samples=1000) > 1)'}"
        with pytest.raises(InvalidRules, match=r"mine.yaml line 5: rules\[1\].when: this rule needs .* \(rule dear\)"):
            load(f"rules:\n\n  - {fine}\n\n  - {dear}\n", "mine.yaml")

    def test_is_a_mistake_in_an_editor(self):
        (mistake,) = mistakes(Part({"name": "mine", "when": "any(median(grad_norm, samples=1000) > 1)"}))
        assert mistake.path == ("when",)
        assert str(mistake).startswith("this rule needs an estimated 3.46 ms")

    def test_is_read_from_a_database_that_had_it_before(self):
        assert one("any(median(grad_norm, samples=1000) > 1)").name == "mine"


class TestRulesThatCostTooMuchTogether:
    def file(self, *lines):
        return json.dumps({"rules": [{"name": f"r{place}", "when": line} for place, line in enumerate(lines)]})

    def test_are_refused(self):
        lines = [f"any(median(grad_norm + {n}, samples=30) > 1)" for n in range(8)]
        with pytest.raises(
            InvalidRules, match=r"its rules need an estimated 2\.\d+ ms .* may need 1\.6 ms; .* of the 8 is r"
        ):
            load(self.file(*lines))

    def test_are_refused_unread_if_they_are_too_many(self):
        with pytest.raises(InvalidRules, match="expected at most 133 rules, got 20,000"):
            load(self.file(*["lss > 3"] * 20_000))

    def test_count_what_they_share_once(self):
        lines = [f"any(median(grad_norm, samples=30) > {n})" for n in range(8)]
        assert len(load(self.file(*lines))) == 8

    @settings(max_examples=30, deadline=None)
    @given(st.lists(CONDITIONS, min_size=1, max_size=4))
    def test_cost_at_most_what_each_costs(self, conditions):
        rules = [rule(Part({"name": f"r{place}", "when": when})) for place, when in enumerate(conditions)]
        together, each = cost_of(rules), [cost_of([one]) for one in rules]
        for found, alone in zip(together, zip(*each, strict=True), strict=True):
            assert found <= sum(alone) + 1e-6


class TestCompiledRules:
    def test_take_about_as_much_memory_as_estimated(self):
        Evaluator(PACK)
        tracemalloc.start()
        evaluator = Evaluator(PACK)
        size_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 0.5 <= size_bytes / evaluator.size_bytes <= 1.5
