"""Where a rule is met, and since when."""

import numpy as np
import pytest

from tsemon.errors import InvalidRules
from tsemon.stacks import Stack, Stacks
from tsemon_server.rules import PACK
from tsemon_server.rules.program import Program, View
from tsemon_server.rules.rule import compile_rule

from .definitions import AT_ONCE, events, layers_view, loss_view, rule

FEW_SAMPLES = {"for": {"samples": 2}, "clear_for": AT_ONCE}


def seen(rule, views):
    return next(event.evidence for event in events([rule], views) if event.kind == "firing")


def blocks(when, *views, **fields):
    return seen(rule(when, **{"for": AT_ONCE, "clear_for": AT_ONCE}, **fields), views)["blocks"]


class TestTheAdvice:
    def test_does_not_name_the_whole_stack_that_stands_for_blocks_that_are_not_known(self):
        ignoring = next(one for one in PACK if one.name == "output-ignores-input")
        views = [
            View(5 * step, {"output_variation": 0.1 if step < 5 else 1e-6}, {"param_norm": np.ones(4)})
            for step in range(12)
        ]
        (fired,) = (event for event in events([ignoring], views) if event.kind == "firing")
        assert fired.evidence["blocks"] == (0, 3)
        assert "blocks" not in fired.advice["text"]


class TestTheHead:
    def of(self, logit):
        view = View(
            0, {}, layers_view(0, max_attention_logit=[1, 90, 95]).layers, {"max_attention_logit": np.array(logit)}
        )
        return seen(rule("any(max_attention_logit > 80)", **{"for": AT_ONCE, "clear_for": AT_ONCE}), [view])["head"]

    def test_is_the_one_that_stands_out_in_the_first_block(self):
        assert self.of([[1, 1, 1], [3, 90, 4], [95, 5, 5]]) == 1

    def test_is_none_if_all_are_alike(self):
        assert self.of([[1, 1, 1], [80, 90, 80], [95, 5, 5]]) is None


class TestBlocks:
    def test_are_those_whose_values_are_beyond_the_threshold(self):
        assert blocks("any(grad_norm > 10)", layers_view(0, grad_norm=[1, 20, 3, 30, 1])) == (1, 3)

    def test_count_from_the_input_of_the_first_block_in_arrays_of_states(self):
        assert blocks("any(hidden_rms > 10)", layers_view(0, hidden_rms=[1, 1, 20, 20])) == (1, 2)

    def test_are_counted_from_the_input_in_a_slice_without_it(self):
        view = layers_view(0, hidden_rms=[1, 1, 20, 20])
        assert blocks("any(slice(hidden_rms, 1) > 10)", view) == (1, 2)

    def test_of_a_slice_have_their_numbers_in_the_model(self):
        view = layers_view(0, grad_norm=[30, 1, 1, 20])
        assert blocks("max(slice(grad_norm, 2, 4)) > 10", view) == (3, 3)

    @pytest.mark.parametrize(
        ("when", "found"),
        [
            ("any(slice(grad_norm, -2) > 10)", "grad_norm (block 3) is 30"),
            ("any(slice(grad_norm, 2) > 10)", "grad_norm (block 3) is 30"),
            ("any(slice(slice(grad_norm, 1), 1, 3) > 10)", "grad_norm (block 3) is 30"),
            ("any(log10(slice(grad_norm, -3, 4)) > 1)", "log10 grad_norm (block 3) is 1.48"),
            ("any(slice(grad_norm, 1) / slice(param_norm, 1) > 5)", "grad_norm / param_norm (block 3) is 30"),
            ("any(slice(hidden_rms, -1) > 10)", "hidden_rms (block 3) is 30"),
            ("any(slice(hidden_rms, 1) / grad_norm > 0.9)", "hidden_rms / grad_norm (block 0) is 1"),
        ],
    )
    def test_of_any_slice_have_their_numbers_in_the_model(self, when, found):
        view = layers_view(0, grad_norm=[1, 1, 1, 30], param_norm=[1, 1, 1, 1], hidden_rms=[9, 1, 1, 1, 30])
        (fired,) = (
            event
            for event in events([rule(when, **{"for": AT_ONCE, "clear_for": AT_ONCE})], [view])
            if event.kind == "firing"
        )
        block = int(found.split("(block ")[1][0])
        assert found in fired.summary
        assert fired.evidence["blocks"][0] == block
        assert fired.evidence["conditions"][0]["block"] == block

    def test_are_not_known_from_the_input_alone(self):
        assert blocks("any(hidden_rms > 10)", layers_view(0, hidden_rms=[20, 1, 1])) is None

    def test_meet_all_conditions_if_some_block_does(self):
        view = layers_view(0, attention_entropy=[0.1, 0.1, 0.9], max_attention_logit=[1, 90, 90])
        assert blocks("any(attention_entropy < 0.2) and any(max_attention_logit > 80)", view) == (1, 1)

    def test_meet_the_first_condition_if_no_block_meets_all(self):
        view = layers_view(0, attention_entropy=[0.1, 0.9, 0.9], max_attention_logit=[1, 1, 90])
        assert blocks("any(attention_entropy < 0.2) and any(max_attention_logit > 80)", view) == (0, 0)

    def test_are_not_those_of_a_condition_that_does_not_hold(self):
        view = layers_view(0, attention_entropy=[0.9, 0.1, 0.9], max_attention_logit=[1, 1, 1])
        assert blocks("any(attention_entropy < 0.2) or any(max_attention_logit > 80)", view) == (1, 1)

    def test_are_unknown_to_a_rule_on_scalars(self):
        assert blocks("loss > 10", loss_view(0, 20.0)) is None

    def test_are_said_by_where(self):
        view = View(0, {"loss": 20.0}, layers_view(0, grad_norm=[1, 2, 10]).layers)
        assert blocks("loss > 10", view, where="grad_norm / max(grad_norm) > 0.15") == (1, 2)

    def test_are_all_if_none_stands_out(self):
        view = View(0, {"loss": 20.0}, layers_view(0, grad_norm=[1, 1, 1]).layers)
        assert blocks("loss > 10", view, where="grad_norm > 5", family="norm") == (0, 2)

    def test_of_a_rule_on_the_loss_are_none_if_none_stands_out(self):
        view = View(0, {"loss": 20.0}, layers_view(0, grad_norm=[1, 1, 1]).layers)
        assert blocks("loss > 10", view, where="grad_norm > 5", family="loss") is None

    def test_are_found_by_what_they_were_some_steps_ago(self):
        views = [
            View(step, {"loss": loss}, layers_view(step, param_norm=norms).layers)
            for step, loss, norms in ((0, 1.0, [1, 5]), (50, 20.0, [2, 5.5]))
        ]
        assert blocks("loss > 10", *views, where="param_norm / previous(own, steps=40) > 1.5") == (0, 0)

    def test_of_the_second_stack_have_their_numbers_in_the_model(self):
        view = layers_view(0, grad_norm=[1, 1, 1, 20])
        stacks = Stacks((Stack("encoder", 2), Stack("decoder", 2)))
        stacked = View(0, view.scalars, view.layers, stacks=stacks)
        assert blocks("any(grad_norm > 10)", stacked) == (3, 3)


class TestWhere:
    def test_is_a_comparison_with_an_answer_per_layer(self):
        with pytest.raises(InvalidRules, match="expected a comparison with an answer per layer"):
            rule("loss > 10", where="max(grad_norm) > 10")


class TestLeftStep:
    def test_is_the_first_sample_beyond_the_threshold_of_clear(self):
        views = [loss_view(step, loss) for step, loss in ((0, 1), (5, 4), (10, 8), (15, 12), (20, 13))]
        assert seen(rule("loss > 10", clear="loss < 3", **FEW_SAMPLES), views)["left_step"] == 5

    def test_is_the_first_sample_beyond_the_threshold_without_clear(self):
        views = [loss_view(step, loss) for step, loss in ((0, 1), (5, 4), (10, 8), (15, 12), (20, 13))]
        assert seen(rule("loss > 10", **FEW_SAMPLES), views)["left_step"] == 15

    def test_is_not_before_a_healthy_sample(self):
        views = [loss_view(step, loss) for step, loss in ((0, 8), (5, 1), (10, 8), (15, 12), (20, 13))]
        assert seen(rule("loss > 10", clear="loss < 3", **FEW_SAMPLES), views)["left_step"] == 10

    def test_looks_past_samples_without_the_metric(self):
        losses = ((0, 1), (5, 4), (7, None), (10, 8), (12, None), (15, 12), (20, 13))
        views = [loss_view(step, loss) for step, loss in losses]
        assert seen(rule("loss > 10", clear="loss < 3", **FEW_SAMPLES), views)["left_step"] == 5

    def test_is_the_same_however_long_the_approach_and_the_patience(self):
        views = [loss_view(5 * sample, loss) for sample, loss in enumerate([1, 8, 1, *[8] * 20, *[12] * 60])]
        one = rule("loss > 10", clear="loss < 3", **{"for": {"samples": 50}})
        told = [event.evidence["left_step"] for event in events([one], views)]
        assert told == [15, 15]

    @pytest.mark.parametrize(("num_outside", "left"), [(60, 5), (61, 310)])
    def test_is_the_step_at_which_it_was_met_if_it_was_just_outside_its_range_for_long(self, num_outside, left):
        views = [loss_view(5 * sample, loss) for sample, loss in enumerate([1, *[8] * num_outside, 12, 12])]
        assert seen(rule("loss > 10", clear="loss < 3", **FEW_SAMPLES), views)["left_step"] == left

    def test_is_of_single_layers_too(self):
        views = [layers_view(5 * sample, grad_norm=[1, norm]) for sample, norm in enumerate([1, 8, 1, 8, 8, 12, 13])]
        assert seen(rule("any(grad_norm > 10)", clear="all(grad_norm < 3)", **FEW_SAMPLES), views)["left_step"] == 15

    def test_stays_while_the_alert_is_open_though_a_sample_is_healthy(self):
        views = [loss_view(5 * sample, loss) for sample, loss in enumerate([1, 8, 12, 1, 12, 12, 12])]
        one = rule("loss > 10", clear="loss < 3", **{"for": {"samples": 3}})
        assert [(event.kind, event.evidence["left_step"]) for event in events([one], views)] == [
            ("pending", 5),
            ("firing", 5),
        ]

    def test_is_that_of_the_next_alert_after_the_first_is_over(self):
        losses = [1, 8, 12, 12, 1, 1, 1, 8, 12, 12]
        views = [loss_view(5 * sample, loss) for sample, loss in enumerate(losses)]
        one = rule("loss > 10", clear="loss < 3", **FEW_SAMPLES)
        told = [event.evidence["left_step"] for event in events([one], views) if event.kind == "firing"]
        assert told == [5, 35]


class TestAdvice:
    def advice(self, text, *views):
        one = rule("any(grad_norm > 10)", advice=text, **{"for": AT_ONCE})
        return next(event.advice["text"] for event in events([one], views) if event.kind == "firing")

    def test_names_the_blocks_and_the_step(self):
        view = layers_view(30, grad_norm=[1, 20, 30])
        assert self.advice("See {blocks} from step {step} on.", view) == "See blocks 1 to 2 from step 30 on."
        assert self.advice("See block {block}.", view) == "See block 1."
        assert self.advice("See {blocks}.", layers_view(0, grad_norm=[1, 1, 30])) == "See block 2."

    def test_names_nothing_else(self):
        with pytest.raises(InvalidRules, match=r"or \{block\}, \{blocks\}, \{step\}"):
            rule("loss > 10", advice="{layer}")


class TestThePack:
    def test_says_where_for_each_rule_of_a_family_that_is_about_blocks(self):
        about_blocks = ("tse", "rank", "norm", "entropy", "dead")
        unknown = {"norm-growth-exponent"}
        for one in PACK:
            if one.family in about_blocks and one.name not in unknown:
                assert any(m.kind != "scalar" for m in compile_rule(one, Program()).where.measures), one.name

    def test_names_all_blocks_if_the_metric_of_where_was_not_measured(self):
        view = View(0, {"loss": 20.0}, {"hidden_rms": np.ones(4), "param_norm": np.ones(3)})
        assert blocks("loss > 10", view, where="grad_norm > 5", family="dead") == (0, 2)
        assert blocks("loss > 10", view, where="grad_norm > 5", family="loss") is None


class TestSeveralStacks:
    def stacked(self, grad_norm):
        stacks = Stacks((Stack("encoder", 2), Stack("decoder", 2)))
        return View(0, {"loss": 20.0}, layers_view(0, grad_norm=grad_norm).layers, stacks=stacks)

    def test_are_searched_for_the_blocks_of_a_rule_on_scalars(self):
        where = "grad_norm > 5"
        assert blocks("loss > 10", self.stacked([1, 1, 1, 9]), where=where) == (3, 3)
        assert blocks("loss > 10", self.stacked([1, 9, 1, 9]), where=where) == (1, 3)
        assert blocks("loss > 10", self.stacked([1, 1, 1, 1]), where=where, family="norm") == (0, 3)

    def test_are_shown_with_the_numbers_of_their_stack(self):
        one = rule("loss > 10", where="grad_norm > 5", evidence={"largest": "max(grad_norm)"}, **{"for": AT_ONCE})
        for of_blocks, block, largest in (([1, 2, 3, 9], 3, 9), ([1, 8, 3, 2], 1, 8)):
            found = seen(one, [self.stacked(of_blocks)])
            assert (found["blocks"], found["numbers"]["largest"]) == ((block, block), largest)


class TestInfinity:
    def test_is_where_the_rule_is_met(self):
        view = View(0, {"loss": 20.0}, layers_view(0, grad_norm=[1, 1, 1e3, np.inf, 1]).layers)
        assert blocks("loss > 10", view, where="grad_norm / max(grad_norm) > 0.3") == (3, 3)
