"""The sub-step that causes an incident, from arrays made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tsemon.stacks import Stack, Stacks
from tsemon_server.incidents.mechanism import OF_NO_SUB_STEP, Arrays, mechanism_of
from tsemon_server.rules import PACK

HEALTHY = {
    "token_similarity": [0.1] * 9,
    "escalation_rate": [1.05] * 8,
    "attention_gain": [0.3] * 8,
    "residual_gain": [1.044] * 8,
    "feedforward_gain": [1.04] * 8,
    "feedforward_escalation_rate": [1.01] * 8,
    "norm_gain": [1.0] * 8,
    "norm_escalation_rate": [1.02] * 8,
    "hidden_rms": [1.5] * 9,
    "max_attention_logit": [2.0] * 8,
    "attention_param_norm": [6.0] * 8,
    "feedforward_param_norm": [9.0] * 8,
    "value_output_growth": [1.2] * 8,
    "nonfinite": [0.0] * 9,
}


def arrays(heads=None, **changes):
    """A healthy frame of eight blocks, but for what is given as metric={entry: value}, or metric=None."""
    found = {name: np.array(values) for name, values in HEALTHY.items()}
    for name, of_entries in changes.items():
        if of_entries is None:
            found[name] = None
        else:
            found[name][list(of_entries)] = list(of_entries.values())
    return Arrays(layers=found, heads=heads or {})


def found_in(newest, *, rule="token-similarity-escalation", blocks=None, healthy=None):
    return mechanism_of(newest, rule=rule, blocks=blocks, healthy=healthy)


class TestMechanism:
    def test_names_the_head_of_a_rule_on_attention_though_no_sub_step_stands_out(self):
        entropy = np.full((8, 4), 0.5)
        entropy[1, 2] = 0.05
        newest = arrays({"attention_entropy": entropy, "max_attention_logit": np.full((8, 4), 2.0)})
        found = found_in(newest, rule="attention-entropy-collapse", blocks=(1, 1), healthy=arrays())
        assert (found.sub_step, found.head) == (None, 2)
        assert found.text.endswith("In block 1, head 2 attends to about a single token (entropy 0.05).")
        assert found_in(newest, blocks=(1, 1), healthy=arrays()).head is None

    def test_is_attention_whose_output_outgrows_the_block_input(self):
        entropy, logits = np.full((8, 4), 0.8), np.full((8, 4), 2.0)
        entropy[7, 3], logits[7, 3] = 0.02, 90.0
        heads = {"attention_entropy": entropy, "max_attention_logit": logits}
        newest = arrays(heads, attention_gain={7: 6.0}, residual_gain={7: 6.1}, escalation_rate={7: 33.0})
        found = found_in(newest)
        assert (found.block, found.sub_step, found.metric, found.head) == (7, "attention", "attention_gain", 3)
        assert found.factor == pytest.approx(20)
        assert found.text == (
            "In block 7, the output of attention is 6 times as large as the block's input, 20 times the 0.3 of the "
            "other blocks, and head 3 attends to about a single token (entropy 0.02). Attention smooths, with the usual "
            "value and output weights: the escalation rate is 33 (Eq. 13 gives 1.1 for random value weights and uniform "
            "attention), the weights multiply what tokens share by 1.2 (usual 1.2), and tokens share 10 % of the input's "
            "energy."
        )

    def test_is_the_residual_that_is_scaled_down(self):
        found = found_in(arrays(residual_gain={4: 0.304}, escalation_rate={4: 12.0}))
        assert (found.block, found.sub_step) == (4, "residual")
        assert "the residual has a weight of about 0.049, 0.049 times the 1" in found.text
        assert "the escalation rate is 12 (Eq. 13 gives 42 for" in found.text  # alpha = 1 / 0.049

    @pytest.mark.parametrize(
        ("metric", "sub_step"),
        [("attention_param_norm", "attention"), ("feedforward_param_norm", "feed-forward")],
    )
    def test_is_the_part_whose_weights_grew_even_if_its_output_did_not(self, metric, sub_step):
        found = found_in(arrays(**{metric: {5: 90.0}}), healthy=arrays())
        assert (found.block, found.sub_step, found.metric) == (5, sub_step, metric)
        assert "have a norm of 90" in found.text

    @pytest.mark.parametrize("metric", ["feedforward_gain", "feedforward_escalation_rate"])
    def test_is_the_feed_forward_part(self, metric):
        found = found_in(arrays(**{metric: {2: 9.0}}))
        assert (found.block, found.sub_step, found.metric) == (2, "feed-forward", metric)

    def test_is_no_feed_forward_part_with_an_output_of_usual_size(self):
        """Of 0.66 times its input, where the others hardly add anything."""
        found = found_in(arrays(feedforward_gain={2: 1.2}), healthy=arrays())
        assert (found.block, found.sub_step) == (None, None)

    def test_says_how_large_the_output_of_the_feed_forward_part_is(self):
        found = found_in(arrays(feedforward_gain={2: 9.0}), healthy=arrays())
        assert "the feed-forward part adds about 8.9 times its input, in the healthy sample 0.5 times" in found.text
        assert found.factor == pytest.approx(80**0.5 / 0.5)

    def test_is_no_logit_that_makes_no_difference(self):
        flat = arrays(max_attention_logit=dict.fromkeys(range(8), 2e-18))
        flat.layers["max_attention_logit"][3] = 1.4e-17
        assert found_in(flat).block is None

    @pytest.mark.parametrize("gain", [30.0, 0.0])
    def test_is_a_norm_also_if_all_behind_it_is_off_as_well(self, gain):
        newest = arrays(norm_gain={2: gain}, attention_gain={2: 9.0}, feedforward_gain={2: 9.0})
        found = found_in(newest)
        assert (found.block, found.sub_step) == (2, "norm")
        assert found.factor == gain

    def test_is_in_the_earliest_block_as_later_ones_get_states_that_are_not_healthy(self):
        found = found_in(arrays(attention_gain={3: 6.0, 4: 8.0, 5: 9.0}))
        assert found.block == 3

    def test_is_looked_for_where_the_alert_saw_it_and_shortly_before(self):
        newest = arrays(attention_gain={0: 9.0, 4: 6.0})
        assert found_in(newest, blocks=(6, 7)).block == 4
        assert found_in(newest).block == 0

    def test_is_relative_to_the_healthy_frame_where_blocks_differ_by_nature(self):
        by_nature = {"attention_gain": {0: 5.0}}
        newest = arrays(attention_gain={0: 5.0, 6: 3.0})
        assert found_in(newest).block == 0
        found = found_in(newest, healthy=arrays(**by_nature))
        assert found.block == 6
        assert "times the 0.3 of the healthy sample" in found.text

    def test_is_not_a_block_that_may_have_been_so_before(self):
        newest = arrays(attention_gain={1: 0.9}, max_attention_logit={3: 60.0})
        found = found_in(newest, blocks=(3, 3), healthy=arrays(attention_gain=None))
        assert (found.block, found.metric) == (3, "max_attention_logit")
        assert found_in(newest, healthy=arrays(attention_gain=None)).block == 3

    def test_may_be_such_a_block_if_the_alert_saw_it_or_nothing_is_larger(self):
        newest = arrays(attention_gain={1: 0.9}, max_attention_logit={3: 60.0})
        assert found_in(newest, blocks=(1, 3), healthy=arrays(attention_gain=None)).block == 1
        newest = arrays(attention_gain={1: 3.0}, max_attention_logit={3: 60.0})
        assert found_in(newest, blocks=(3, 3), healthy=arrays(attention_gain=None)).block == 1

    def test_is_none_if_all_blocks_changed_alike(self):
        newest = arrays(attention_gain=dict.fromkeys(range(8), 3.0), residual_gain=dict.fromkeys(range(8), 3.2))
        found = found_in(newest, healthy=arrays())
        assert found.sub_step is None
        assert found.text.startswith("The sub-step is unknown: no block stands out, as the largest difference from the")

    def test_is_unknown_without_the_slow_tier_unless_the_usual_metrics_decide(self):
        slow = ("attention_gain", "residual_gain", "feedforward_gain", "feedforward_escalation_rate", "norm_gain")
        missing = dict.fromkeys(slow)
        assert "the frame lacks the metrics of sub-steps" in found_in(arrays(**missing)).text
        assert found_in(arrays(**missing, escalation_rate={5: 20.0})).sub_step == "attention"

    def test_is_unknown_of_a_frame_without_any_of_its_metrics(self):
        assert found_in(Arrays(layers={"loss": None})).text.startswith(
            "The sub-step is unknown: the stored samples of that time have none of"
        )

    def test_survives_any_value_that_is_missing(self):
        for name in HEALTHY:
            for value in (np.nan, np.inf, 0.0):
                newest = arrays(**{name: dict.fromkeys(range(8), value)})
                assert found_in(newest).text
                assert found_in(arrays(), healthy=newest).text
                assert found_in(newest, healthy=newest).text

    @pytest.mark.parametrize("metric", ["residual_gain", "attention_gain"])
    @pytest.mark.parametrize("healthy", [arrays(), None])
    def test_is_no_residual_whose_weight_cannot_be_known(self, metric, healthy):
        assert found_in(arrays(**{metric: {6: np.nan}}), healthy=healthy).sub_step is None

    @pytest.mark.parametrize("metric", ["attention_param_norm", "feedforward_gain", "norm_gain"])
    def test_is_no_block_that_stayed_as_it_was(self, metric):
        """All other blocks changed."""
        changed = {block: 0.1 * HEALTHY[metric][0] for block in range(8) if block != 3}
        assert found_in(arrays(**{metric: changed}), healthy=arrays()).block != 3

    def test_expects_nothing_of_a_residual_without_weight(self):
        found = found_in(arrays(residual_gain={4: 0.29}, escalation_rate={4: 12.0}))
        assert found.sub_step == "residual"
        assert "the escalation rate is 12, " in found.text


def second_sentence(changed, *, gain=3.0, healthy=arrays()):
    """About attention of block 4, whose output is too large."""
    found = found_in(arrays(attention_gain={4: gain}, **changed), healthy=healthy)
    assert (found.block, found.sub_step) == (4, "attention")
    _, second = found.text.removesuffix(".").split(". Attention ")
    return f"Attention {second}"


class TestWhyAttentionSmooths:
    def test_is_its_weights(self):
        assert second_sentence({"escalation_rate": {4: 2.5}, "value_output_growth": {4: 3.1}}) == (
            "Attention smooths by its weights: the escalation rate is 2.5 (Eq. 13 gives 1.1 for random value weights and "
            "uniform attention), the weights multiply what tokens share by 3.1 (usual 1.2), and tokens share 10 % of the "
            "input's energy (usual 10 %)"
        )

    def test_is_its_inputs(self):
        assert second_sentence({"escalation_rate": {4: 1.9}, "token_similarity": {4: 0.98}}) == (
            "Attention smooths by its inputs, not by its weights: the escalation rate is 1.9 (Eq. 13 gives 1.98 for random "
            "value weights and uniform attention), the weights multiply what tokens share by 1.2 (usual 1.2), and tokens "
            "share 98 % of the input's energy (usual 10 %)"
        )

    def test_is_both(self):
        changed = {"escalation_rate": {4: 2.5}, "value_output_growth": {4: 3.1}, "token_similarity": {4: 0.98}}
        assert second_sentence(changed).startswith("Attention smooths by its weights and by its inputs: ")

    def test_is_neither_if_both_are_as_usual(self):
        assert second_sentence({"escalation_rate": {4: 1.5}}).startswith(
            "Attention smooths, with the usual value and output weights and usual inputs: "
        )

    def test_is_its_weights_if_it_sharpens(self):
        changed = {"escalation_rate": {4: 0.6}, "value_output_growth": {4: 0.2}}
        assert second_sentence(changed).startswith("Attention sharpens by its weights: the escalation rate is 0.6 ")

    def test_is_none_if_it_hardly_does(self):
        changed = {"escalation_rate": {4: 1.01}, "value_output_growth": {4: 3.1}}
        assert second_sentence(changed).startswith(
            "Attention hardly changes token similarity: the escalation rate is 1.01 "
        )

    @pytest.mark.parametrize(
        "changed",
        [
            {"value_output_growth": {4: 0.2}},
            {"value_output_growth": {4: np.nan}},
            {"value_output_growth": None},
        ],
    )
    def test_is_unknown_if_weights_speak_against_it_or_are_unknown(self, changed):
        assert second_sentence({"escalation_rate": {4: 2.5}} | changed).startswith("Attention smooths: ")

    @pytest.mark.parametrize("shared", [0.4, 0.01, np.nan])
    def test_is_not_inputs_that_changed_little_or_the_other_way_or_are_unknown(self, shared):
        changed = {"escalation_rate": {4: 2.5}, "token_similarity": {4: shared}}
        assert second_sentence(changed).startswith("Attention smooths, with the usual value and output weights: ")

    def test_is_compared_with_the_other_blocks_without_a_healthy_frame(self):
        second = second_sentence({"escalation_rate": {4: 2.5}, "value_output_growth": {4: 3.1}}, healthy=None)
        assert second.startswith("Attention smooths by its weights: ")
        assert second.endswith(
            "multiply what tokens share by 3.1 (usual 1.2), and tokens share 10 % of the input's energy"
        )

    def test_is_not_told_without_an_escalation_rate(self):
        found = found_in(arrays(attention_gain={4: 3.0}, escalation_rate=None))
        assert found.text.endswith("times the 0.3 of the other blocks.")

    def test_is_told_of_no_block_if_none_stands_out_and_the_alert_names_none(self):
        similar = {"token_similarity": dict.fromkeys(range(9), 0.98), "escalation_rate": dict.fromkeys(range(8), 1.9)}
        assert ". In " not in found_in(arrays(**similar), healthy=arrays()).text

    def test_is_told_of_the_first_block_if_no_block_stands_out(self):
        similar = {"token_similarity": dict.fromkeys(range(9), 0.98), "escalation_rate": dict.fromkeys(range(8), 1.9)}
        found = found_in(arrays(**similar), blocks=(2, 7), healthy=arrays())
        assert (found.block, found.sub_step) == (None, None)
        first, second = found.text.split(". In ")
        assert first.startswith("The sub-step is unknown: no block stands out")
        assert second.startswith(
            "block 2, attention smooths by its inputs, not by its weights: the escalation rate is 1.9 "
        )


class TestWhatAnotherSubStepDoes:
    NORM = "Normalization smooths: the escalation rate is 1.7 (usual 1.02)"

    def second_sentence(self, *, healthy=arrays(), **changed):
        return found_in(arrays(**changed), healthy=healthy).text.partition(". ")[2]

    def test_is_told_of_the_feed_forward_part(self):
        assert self.second_sentence(feedforward_gain={2: 9.0}, feedforward_escalation_rate={2: 3.4}) == (
            "The feed-forward part smooths: the escalation rate is 3.4 (usual 1.01), and it multiplies the size of hidden "
            "states by 9 (usual 1.04)."
        )

    @pytest.mark.parametrize(
        ("rate", "does"), [(0.6, "sharpens"), (1.01, "hardly changes token similarity"), (1.7, "smooths")]
    )
    def test_is_told_of_a_norm_with_the_output_of_its_block(self, rate, does):
        changed = {"norm_gain": {2: 30.0}, "norm_escalation_rate": {2: rate}, "hidden_rms": {2: 7.0, 3: 45.0}}
        assert self.second_sentence(**changed) == (
            f"Normalization {does}: the escalation rate is {rate} (usual 1.02), and the block's output has a root mean "
            "square of 45 (usual 1.5)."
        )

    def test_is_compared_with_the_other_blocks_without_a_healthy_frame(self):
        changed = {"norm_gain": {2: 30.0}, "norm_escalation_rate": {2: 1.7}, "hidden_rms": {3: 45.0}}
        assert self.second_sentence(healthy=None, **changed) == (
            f"{self.NORM}, and the block's output has a root mean square of 45."
        )

    def test_lacks_numbers_that_are_unknown(self):
        norm = {"norm_gain": {2: 30.0}, "norm_escalation_rate": {2: 1.7}, "hidden_rms": None}
        assert self.second_sentence(**norm) == f"{self.NORM}."
        norm = {"norm_gain": {2: 0.01}, "norm_escalation_rate": {2: np.nan}, "hidden_rms": {3: 0.02}}
        assert self.second_sentence(**norm) == "The block's output has a root mean square of 0.02 (usual 1.5)."

    def test_is_not_told_without_numbers(self):
        assert self.second_sentence(norm_gain={2: 30.0}, norm_escalation_rate=None, hidden_rms=None) == ""


def test_a_failure_of_the_optimizer_or_of_the_data_has_no_sub_step():
    assert {rule.name for rule in PACK} >= OF_NO_SUB_STEP
    for rule in OF_NO_SUB_STEP:
        found = found_in(arrays(feedforward_gain={4: 20.0}), rule=rule)
        assert found.block is None
        assert found.text.startswith("The cause is not a sub-step")


class TestMechanismOfNaN:
    def of_a_frame(self):
        gains = dict.fromkeys(range(3, 8), np.nan)
        newest = arrays(nonfinite=dict.fromkeys(range(4, 9), 1.0), feedforward_gain=gains)
        return replace(newest, is_origin=True)

    def test_is_the_first_sub_step_that_has_no_value(self):
        found = found_in(self.of_a_frame(), rule="non-finite-activations")
        assert (found.block, found.sub_step) == (3, "feed-forward")
        assert found.text == (
            "Block 3 is the first whose output holds NaN or infinities, in 100 % of the sequences. The feed-forward part "
            "makes them."
        )

    def test_is_before_the_blocks_if_the_first_of_them_gets_it_before_an_optimizer_step(self):
        everywhere = arrays(nonfinite=dict.fromkeys(range(9), 1.0))
        origin = found_in(replace(everywhere, is_origin=True))
        assert origin.block is None
        assert origin.text.endswith(": their cause is in the embeddings or in the data.")
        assert "they may have begun anywhere" in found_in(everywhere).text

    def test_is_unknown_once_an_optimizer_step_may_have_spread_it(self):
        found = found_in(replace(self.of_a_frame(), is_origin=False))
        assert (found.block, found.sub_step) == (3, None)
        assert found.text.endswith(
            "they may have begun anywhere, because an optimizer step spreads them to all parameters."
        )

    def test_is_in_the_stack_that_makes_it(self):
        seq2seq = Stacks((Stack("encoder", 3), Stack("decoder", 5)))
        begins_in = {
            3: (2, "Block 2 of the encoder is the first"),
            4: (None, "The first block of the decoder"),
            5: (3, "Block 0 of the decoder is the"),
        }
        for entry, (block, text) in begins_in.items():
            nonfinite = np.where(np.arange(10) >= entry, 1.0, 0.0)
            found = found_in(Arrays(layers={"nonfinite": nonfinite}, stacks=seq2seq, is_origin=True))
            assert found.block == block
            assert found.text.startswith(text)

    def test_is_unknown_where_some_sequences_are_finite(self):
        found = found_in(replace(arrays(nonfinite={5: 0.25}), is_origin=True))
        assert (found.block, found.sub_step) == (4, None)
        assert "The sub-step is unknown: the sub-steps are measured on finite sequences alone" in found.text

    def test_is_unknown_without_metrics_of_sub_steps(self):
        missing = dict.fromkeys(("attention_gain", "residual_gain", "feedforward_gain", "norm_gain"))
        found = found_in(replace(arrays(**missing, nonfinite=dict.fromkeys(range(5, 9), 1.0)), is_origin=True))
        assert (found.block, found.sub_step) == (4, None)
        assert "the frame has no metrics of its sub-steps" in found.text

    @pytest.mark.parametrize("rule", ["non-finite-gradient", "loss-not-finite"])
    def test_is_none_while_all_states_are_finite(self, rule):
        changed = arrays(feedforward_gain={4: 20.0})
        assert "all hidden states of the frame are finite" in found_in(changed, rule=rule).text

    @pytest.mark.parametrize("newest", [arrays(), arrays(nonfinite=None)])
    def test_is_not_seen_if_the_step_in_which_it_begins_shows_none(self, newest):
        found = found_in(replace(newest, is_origin=True), rule="loss-not-finite")
        assert found.block is None
        assert "saw before NaN or infinity spread were finite. Check the last batches" in found.text

    def test_is_unknown_if_nobody_looked_for_it(self):
        assert "the frame does not tell which" in found_in(arrays(nonfinite=None), rule="loss-not-finite").text
