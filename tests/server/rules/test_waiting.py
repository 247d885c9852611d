"""What a rule says it waits for before it can fire."""

import re

import numpy as np
import pytest

from tsemon.stacks import Stack, Stacks
from tsemon_server.rules import PACK
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.program import View

from .definitions import AT_ONCE, loss_view, rule
from .traces import FOLDER, read

HIGH = 100.0
TWO = Stacks((Stack("encoder", 2), Stack("decoder", 2)))


def waits(evaluator, state):
    return {status.rule.name: status.waits_for for status in evaluator.statuses(state)}


def course(when, losses, every=10, **fields):
    """What a rule waits for before each sample, and the number of samples until it fires."""
    evaluator = Evaluator([rule(when, **{"for": AT_ONCE} | fields)])
    state, said = evaluator.start(), []
    for place, loss in enumerate(losses):
        said.append(waits(evaluator, state)["test"])
        if any(event.kind == "firing" for event in evaluator.advance(state, loss_view(place * every, loss))):
            return said
    raise AssertionError("it never fires")


class TestARuleThatCannotFireYet:
    @pytest.mark.parametrize(
        ("when", "num"),
        [
            ("mean(loss, samples=4) > 10", 4),
            ("loss > 0.5 * previous(loss, 3)", 4),
            ("z_score(loss, 5) > 3", 6),
            ("loss / start(own, samples=3) > 0.5", 3),
            ("loss / start(previous(loss, 2), samples=3) > 0.5", 5),
            ("loss > 10 and mean(loss, samples=3) > 10", 3),
            ("loss > 10 after 4 samples", 5),
            ("mean(loss, samples=2) > 10 after 4 samples", 5),
        ],
    )
    def test_says_how_many_samples_it_needs(self, when, num):
        losses = [1.0] * 5 + [HIGH] if when.startswith("z") else [HIGH] * 9
        said = course(when, losses)
        assert len(said) == num
        with_loss = "" if "after" in when else " with loss"
        assert said[:-1] == [f"{left} more samples{with_loss}" for left in range(num, 1, -1)]
        assert said[-1].startswith("" if "after" in when else "1 more sample with loss")

    def test_counts_only_samples_with_what_it_needs(self):
        said = course("mean(loss, samples=3) > 10", [HIGH, None, HIGH, None, HIGH])
        assert said == [f"{left} more samples with loss" for left in (3, 2, 2)] + ["1 more sample with loss"] * 2

    def test_says_how_many_steps_must_pass(self):
        said = course("mean(loss, samples=3) > 10 after 35 steps", [HIGH] * 9)
        assert said[:3] == [
            "3 more samples with loss and 35 more steps",
            "2 more samples with loss and 35 more steps",
            "1 more sample with loss and 25 more steps",
        ]

    @pytest.mark.parametrize(
        ("when", "num"),
        [
            ("loss > 10", 3),
            ("mean(loss, samples=4) > 10", 6),
            ("loss > 10 after 4 samples", 7),
            ("loss > 10 or mean(loss, samples=9) > 10", 3),
        ],
    )
    def test_counts_the_samples_of_its_hold(self, when, num):
        said = course(when, [HIGH] * 9, **{"for": {"samples": 3}})
        assert [int(one.split()[0]) for one in said] == [*range(num, 0, -1)]

    def test_counts_the_steps_of_its_hold(self):
        said = course("loss > 10 after 15 steps", [HIGH] * 9, **{"for": {"samples": 2, "steps": 25}})
        assert said == [
            "2 more samples and 40 more steps",
            "2 more samples and 40 more steps",
            "2 more samples and 30 more steps",
            "20 more steps",
            "10 more steps",
            "",
        ]

    def test_is_not_one_whose_hold_could_have_passed(self):
        evaluator = Evaluator([rule("loss > 10")])
        state = evaluator.start()
        for step in range(3):
            assert waits(evaluator, state)["test"] == f"{3 - step} more sample{'s' * (step < 2)}"
            evaluator.advance(state, loss_view(step, 1.0))
        assert waits(evaluator, state)["test"] == ""

    def test_waits_for_its_hold_but_not_for_a_guard_which_stops_nothing_while_it_is_unknown(self):
        guarded = {"only_while": "mean(loss, samples=9) > 1", "for": {"samples": 2}}
        assert course("loss > 10", [HIGH] * 9, **guarded) == ["2 more samples", "1 more sample"]

    @pytest.mark.parametrize(
        "when",
        [
            "loss > 10",
            "loss > 10 or mean(loss, samples=9) > 10",
            "not (loss < 10 and mean(loss, samples=9) < 10)",
            "not (loss < 10 and mean(loss, samples=9) < 10 or loss < 5 and mean(loss, samples=8) < 10)",
            "not held(loss < 10 and mean(loss, samples=9) < 10, 1, of=3)",
            "steps_in(loss < 10 and mean(loss, samples=9) < 10) < 5",
            "not measured(mean(loss, samples=9))",
        ],
    )
    def test_is_not_one_that_a_part_of_the_condition_lets_fire(self, when):
        assert course(when, [HIGH]) == [""]

    def test_names_no_metric_if_one_of_several_is_enough(self):
        when = 'mean(loss, samples=4) > 10 or mean(scalar("other"), samples=3) > 10'
        assert course(when, [HIGH] * 4)[0] == "3 more samples"

    def test_counts_in_the_stack_that_needs_fewest(self):
        evaluator = Evaluator([rule('max(mean(layers("x"), samples=3)) > 10', **{"for": AT_ONCE})])
        state, said = evaluator.start(), []
        for step in range(3):
            said.append(waits(evaluator, state)["test"])
            layers = {"x": np.array([np.nan, np.nan, HIGH, HIGH])}
            fired = evaluator.advance(state, View(step, {}, layers, stacks=TWO))
        assert said == ["3 more samples with x", "2 more samples with x", "1 more sample with x"]
        assert fired

    def test_says_the_same_beside_other_rules(self):
        one, other = "loss > 10 and mean(loss, samples=9) > 10", "not (loss > 10 and mean(loss, samples=9) > 10)"
        evaluator = Evaluator([rule(each, name, **{"for": AT_ONCE}) for each, name in ((one, "one"), (other, "other"))])
        assert waits(evaluator, evaluator.start()) == {"one": "9 more samples with loss", "other": ""}


class TestARuleThatWasNeverEvaluated:
    def test_says_that_its_values_were_undefined(self):
        evaluator = Evaluator([rule("loss / previous(loss) > 100", **{"for": {"samples": 2}})])
        state = evaluator.start()
        assert waits(evaluator, state)["test"] == "3 more samples with loss"
        for step in range(20):
            evaluator.advance(state, loss_view(step, 0.0))
        assert waits(evaluator, state)["test"] == "2 more samples with loss whose values are all defined"
        evaluator.advance(state, loss_view(20, 1.0))
        evaluator.advance(state, loss_view(21, 2.0))
        assert waits(evaluator, state)["test"] == ""

    def test_says_that_a_single_sample_is_missing(self):
        evaluator = Evaluator([one for one in PACK if one.name == "exploding-gradient"])
        state = evaluator.start()
        for step in range(8):
            evaluator.advance(state, View(step, {"total_grad_norm": 2.0 + step}))
        (status,) = evaluator.statuses(state)
        assert (status.state, status.waits_for) == ("unknown", "2 more samples with total_grad_norm and 5 more steps")


class TestTheBuiltInRulesWithHolds:
    def test_are_listed_after_one_sample_and_not_after_twenty(self):
        evaluator = Evaluator(PACK)
        state, num_listed = evaluator.start(), 0
        views = read(FOLDER / "tse_vit24-s0.jsonl.gz").views
        evaluator.advance(state, views[0])
        for status in evaluator.statuses(state):
            if status.state != "unknown" and status.rule.hold.samples > 1:
                samples, steps = (int(part.split()[0]) for part in status.waits_for.split(" and "))
                assert samples >= status.rule.hold.samples - 1, status
                assert steps >= status.rule.hold.steps, status
                num_listed += 1
        assert num_listed == 23
        assert waits(evaluator, state)["vanishing-gradient"] == "2 more samples and 10 more steps"
        for view in views[1:]:
            evaluator.advance(state, view)
        judged = {one.rule.name: one.waits_for for one in evaluator.statuses(state) if one.state != "unknown"}
        assert {name: text for name, text in judged.items() if text} == {
            "loss-stall": "50 more steps",
            "norm-growth-exponent": "3 more samples and 20 more steps",
        }


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.jsonl.gz")))
def test_no_built_in_rule_fires_while_it_says_that_it_cannot(name):
    evaluator = Evaluator(PACK)
    state, num_told = evaluator.start(), 0
    for view in read(FOLDER / name).views:
        before, gap = waits(evaluator, state), view.step - (state.last_step or 0)
        num_told += sum(map(bool, before.values()))
        fired = {event.rule.name for event in evaluator.advance(state, view) if event.kind == "firing"}
        for number, unit in re.findall(r"(\d+) more (sample|step)", " ".join(map(before.get, fired))):
            assert int(number) <= (1 if unit == "sample" else gap)
    assert num_told > 0
