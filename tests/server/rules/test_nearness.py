"""Which block is nearest to a rule."""

import math

import numpy as np
import pytest

from tests.server.replay.runs import FOLDER
from tsemon.stacks import Stack, Stacks
from tsemon_server.rules import PACK
from tsemon_server.rules.documents import load
from tsemon_server.rules.nearness import Nearness
from tsemon_server.rules.program import View
from tsemon_server.services.replay.traces import Trace

NAN = math.nan


def nearest(when, stacks=None, frozen=(), **layers):
    rules = load(f"rules: [{{name: own, when: '{when}'}}]")
    arrays = {name: np.array(values) for name, values in layers.items()}
    return Nearness(rules).nearest(View(0, layers=arrays, stacks=stacks, frozen=frozenset(frozen)))


def place_of(near):
    return near.metric, near.place["layer"], near.value, near.threshold


class TestTheNearestBlock:
    def test_has_the_lowest_distance_in_decades_from_the_threshold(self):
        near = nearest("any(grad_norm < 1e-3)", grad_norm=[1.0, 0.1, 10.0])
        assert place_of(near) == ("grad_norm", 1, 0.1, 1e-3)
        assert near.decades == pytest.approx(2)

    def test_is_the_highest_one_if_the_threshold_is_above(self):
        near = nearest("max(max_attention_logit) > 100", max_attention_logit=[1.0, 1000.0, 10.0])
        assert place_of(near) == ("max_attention_logit", 1, 1000.0, 100)
        assert near.decades == pytest.approx(-1), "beyond the threshold"

    def test_of_a_share_is_compared_by_odds(self):
        assert nearest("any(dead_units > 0.8)", dead_units=[0.0, 0.5]).decades == pytest.approx(math.log10(4))

    def test_of_hidden_states_is_the_output_of_a_block_never_the_input(self):
        near = nearest("last(token_diversity) < 1e-3", token_diversity=[1e-6, 0.5, 0.1])
        assert place_of(near) == ("token_diversity", 2, 0.1, 1e-3)

    def test_is_as_far_as_the_farthest_of_the_conditions_that_must_hold_together(self):
        when = "any(attention_entropy < 0.1) and any(max_attention_logit > 100)"
        near = nearest(when, attention_entropy=[0.01, 0.5], max_attention_logit=[10.0, 50.0])
        assert place_of(near) == ("attention_entropy", 1, 0.5, 0.1), "sharp attention with small logits is healthy"

    def test_is_as_near_as_the_nearest_of_those_of_which_one_is_enough(self):
        when = "any(attention_entropy < 0.1) or any(max_attention_logit > 100)"
        near = nearest(when, attention_entropy=[0.9, 0.9], max_attention_logit=[10.0, NAN])
        assert place_of(near) == ("max_attention_logit", 0, 10.0, 100)

    def test_joins_hidden_states_with_the_block_that_writes_them(self):
        when = "any(token_diversity < 0.1) and any(grad_norm < 1)"
        near = nearest(when, token_diversity=[1.0, 1e-3, 1e-3], grad_norm=[1e3, 10.0])
        assert place_of(near) == ("grad_norm", 1, 10.0, 1)

    def test_may_be_of_an_expression(self):
        near = nearest("any(update_norm / param_norm > 0.1)", update_norm=[1.0, 1.0], param_norm=[100.0, 50.0])
        assert place_of(near) == ("update_norm / param_norm", 1, 0.02, 0.1)

    def test_is_not_one_that_is_frozen_on_purpose(self):
        when = "any(skip_frozen(grad_norm) < 1e-3)"
        assert nearest(when, frozen=[0], grad_norm=[0.0, 1.0]).place == {"layer": 1, "block": 1}

    def test_is_called_by_its_stack(self):
        stacks = Stacks((Stack("encoder", 1), Stack("decoder", 2)))
        diversity = [1.0, 0.9, 1.0, 0.5, 0.2]
        near = nearest("last(token_diversity) < 1e-3", stacks, token_diversity=diversity)
        assert near.place == {"layer": 4, "block": 2, "label": "decoder 2"}

    @pytest.mark.parametrize(
        "when",
        [
            "max(hidden_rms) / start(own, samples=3) > 60",
            "any(hidden_rms > 60) and max(hidden_rms) / start(own, samples=3) > 2",
            "any(hidden_rms > 60) and output_variation < 0.1",
            "any(nonfinite > 0)",
            "any(grad_norm < 1)",
        ],
        ids=["earlier frames", "earlier frames too", "the whole run", "a threshold of 0", "not measured"],
    )
    def test_is_of_no_rule_that_one_frame_does_not_tell(self, when):
        assert nearest(when, hidden_rms=[1.0, 2.0], nonfinite=[0.0, 0.5]) is None

    def test_says_nothing_of_values_of_0(self):
        assert nearest("any(dead_units > 0.8)", dead_units=[0.0, 0.0]) is None


@pytest.fixture(scope="module")
def nearness():
    return Nearness(rule for rule in PACK if rule.severity != "info")


class TestTheBuiltInRules:
    def last(self, nearness, name):
        (run,) = Trace(FOLDER / f"{name}-s0.jsonl.gz").attempts()
        return nearness.nearest([*run.views][-1])

    @pytest.mark.parametrize(
        ("name", "rule", "metric"),
        [
            ("tse_vit24", "token-similarity-escalation", "token_diversity"),
            ("ent_qk20", "attention-entropy-collapse", "max_attention_logit"),
            ("dead_relu", "dead-units", "dead_units"),
            ("dead_lr0", "block-does-not-move", "update_norm / param_norm"),
        ],
    )
    def test_are_met_at_the_end_of_failing_runs(self, nearness, name, rule, metric):
        near = self.last(nearness, name)
        assert (near.rule, near.metric) == (rule, metric)
        assert near.decades < 0

    @pytest.mark.parametrize("name", ["h_vit48_pre", "h_massdim", "h_sink", "h_frozenlow", "h_qk8_norm"])
    def test_are_not_met_by_healthy_runs_that_look_alike(self, nearness, name):
        """The diversity of the last of 48 pre-norm blocks is 0.005, below thresholds of rules with further conditions."""
        assert self.last(nearness, name).decades > 0.1
