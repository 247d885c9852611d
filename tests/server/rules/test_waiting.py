"""What a rule says it waits for before it can fire."""

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
    evaluator = Evaluator([rule(when, **{"for": AT_ONCE}, **fields)])
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
            "25 more steps",
        ]

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
        evaluator = Evaluator([rule(one, "one"), rule(other, "other")])
        assert waits(evaluator, evaluator.start()) == {"one": "9 more samples with loss", "other": ""}


class TestARuleThatWasNeverEvaluated:
    def test_says_that_its_values_were_undefined(self):
        evaluator = Evaluator([rule("loss / previous(loss) > 100")])
        state = evaluator.start()
        assert waits(evaluator, state)["test"] == "2 more samples with loss"
        for step in range(20):
            evaluator.advance(state, loss_view(step, 0.0))
        assert waits(evaluator, state)["test"] == "1 more sample with loss whose values are all defined"
        evaluator.advance(state, loss_view(20, 1.0))
        evaluator.advance(state, loss_view(21, 2.0))
        assert waits(evaluator, state)["test"] == ""

    def test_says_that_a_single_sample_is_missing(self):
        evaluator = Evaluator([one for one in PACK if one.name == "exploding-gradient"])
        state = evaluator.start()
        for step in range(8):
            evaluator.advance(state, View(step, {"total_grad_norm": 2.0 + step}))
        (status,) = evaluator.statuses(state)
        assert (status.state, status.waits_for) == ("unknown", "1 more sample with total_grad_norm")


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.jsonl.gz")))
def test_no_built_in_rule_is_met_while_it_says_that_it_cannot_fire(name):
    evaluator = Evaluator(PACK)
    state, num_told = evaluator.start(), 0
    for view in read(FOLDER / name).views:
        before, gap = waits(evaluator, state), view.step - (state.last_step or 0)
        num_told += sum(map(bool, before.values()))
        met = {event.rule.name for event in evaluator.advance(state, view) if event.kind in ("pending", "firing")}
        told = {text for text in map(before.get, met) if not text.startswith("1 more sample ")}
        assert told <= {"", *(f"{steps} more steps" for steps in range(1, gap + 1))}
    assert num_told > 0
