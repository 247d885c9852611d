"""The rule against the recorded trainings in tests/data/traces."""

import json
from dataclasses import replace

import numpy as np
import pytest
from report import RULE, firing_steps, replay
from traces import onset, read_all

TRACES = read_all()
BY_NAME = {trace.name: trace for trace in TRACES}

# Where each fires, by the sampling it was recorded with. A change of a threshold shows here.
FIRING_STEP = {
    "digits-post-norm-s0": 45,
    "text-post-norm-s0": 40,
    "tse_lm16-s0": 20,
    "tse_lm24-s0": 20,
    "tse_post6_lr-s0": 15,
    "tse_post6_warm-s0": 30,
    "tse_vit24-s0": 20,
    "tse_vit36-s0": 20,
}
# By how many steps an alert follows the loss, where it does: there the loss is behind almost from the start.
STEPS_LATE = {"digits-post-norm-s0": 24, "tse_vit36-s0": 6}
SHARED_DIRECTION = "tse_pre_lr-s0"
# The runs of `tsemon demo` and `tsemon demo --text`: each a model that fails, and its twin.
DEMOS = ("digits", "text")


def named(predicate):
    return [pytest.param(trace, id=trace.name) for trace in TRACES if predicate(trace)]


class TestARunThatEscalates:
    @pytest.mark.parametrize("trace", named(lambda t: t.family == "tse" and t.name != SHARED_DIRECTION))
    def test_fires(self, trace):
        assert firing_steps(replay(trace)) == [FIRING_STEP[trace.name]]

    @pytest.mark.parametrize("name", sorted(set(FIRING_STEP) - set(STEPS_LATE)))
    def test_fires_before_its_loss_falls_behind(self, name):
        trace = BY_NAME[name]
        assert FIRING_STEP[name] < onset(trace, BY_NAME[trace.header["twin"]])

    @pytest.mark.parametrize("name", STEPS_LATE)
    def test_fires_after_its_loss_where_that_is_behind_almost_from_the_start(self, name):
        trace = BY_NAME[name]
        assert FIRING_STEP[name] - onset(trace, BY_NAME[trace.header["twin"]]) == STEPS_LATE[name]

    def test_is_not_seen_where_all_samples_collapse_onto_one_direction(self):
        """Pre-norm at a learning rate 50 times too high: centred, its tokens share no more than healthy ones do."""
        trace = BY_NAME[SHARED_DIRECTION]
        assert firing_steps(replay(trace)) == []
        low = [v for v in trace.views if v.layers["token_diversity"][-1] < 3e-3]
        assert low
        assert max(v.layers["centred_token_similarity"][-1] for v in low) < 0.3

    def test_gives_evidence_that_is_plain_json(self):
        for name in FIRING_STEP:
            for event in replay(BY_NAME[name]):
                json.dumps(event.evidence, allow_nan=False)
                assert event.evidence["fit"]["critical_tau"] > 0

    def test_resolves_when_the_tokens_come_apart_again(self):
        assert [e.resolved_step for e in replay(BY_NAME["tse_post6_warm-s0"]) if e.kind == "resolved"] == [55]


class TestAHealthyRun:
    @pytest.mark.parametrize("trace", named(lambda t: t.is_healthy))
    def test_never_fires(self, trace):
        assert firing_steps(replay(trace)) == []

    def test_would_alarm_on_token_similarity_alone(self):
        with_tokens = [t for t in TRACES if t.is_healthy and t.has_tokens]
        alarmed = [t for t in with_tokens if any(v.layers["token_similarity"][-1] > 0.95 for v in t.views)]
        assert {"h_vit48_pre-s0", "h_vit36_pre-s0", "h_massdim-s0"} <= {t.name for t in alarmed}
        assert len(alarmed) / len(with_tokens) > 0.3

    def test_stays_a_factor_of_two_above_the_threshold_and_three_decades_above_total_collapse(self):
        lowest = min(v.layers["token_diversity"][-1] for t in TRACES if t.is_healthy and t.has_tokens for v in t.views)
        assert lowest > 2 * RULE.low_diversity
        assert lowest > 1e3 * RULE.total_collapse_diversity


class TestADemo:
    @pytest.mark.parametrize("name", DEMOS)
    def test_fires_for_total_collapse_alone(self, name):
        """All samples fall onto one vector, so what is left after centring belongs to the tokens as much as ever."""
        trace = BY_NAME[f"{name}-post-norm-s0"]
        events = replay(trace)
        assert [event.kind for event in events] == ["pending", "firing"]
        for event in events:
            assert event.evidence["conditions"] == {
                "low_diversity": True,
                "falls_over_depth": True,
                "shared_within_samples": False,
                "total_collapse": True,
            }
        assert replay(trace, replace(RULE, high_centred=2.0)) != []
        assert replay(trace, replace(RULE, total_collapse_diversity=0.0)) == []

    @pytest.mark.parametrize("name", DEMOS)
    def test_is_never_even_pending_where_it_is_de_escalated(self, name):
        trace = BY_NAME[f"{name}-de-escalated-s0"]
        assert len(trace.views) == 60
        assert all(np.isfinite(view.layers["token_diversity"]).all() for view in trace.views)
        assert replay(trace) == []
