import numpy as np
import pytest

from tsemon.lab.reproduce.de_escalation import (
    AFTER,
    ALPHAS,
    OFFSETS,
    around_critical,
    critical,
    diversity,
    experiment,
)
from tsemon.lab.reproduce.observing import forward
from tsemon.lab.reproduce.random_encoder import caught, random_encoder, random_tokens, twin
from tsemon.measures import token_diversity

SIZES = {"depth": 4, "width": 32, "heads": 4, "ffn": 32}


class TestDiversity:
    @pytest.fixture
    def model(self):
        return twin(random_encoder(5, **SIZES), tau=0.4)

    def test_is_seen_before_and_after_the_operator(self, model):
        before, after = diversity(model, 5)
        with caught(model) as seen:
            forward(model, random_tokens(5, 32))
        assert before == pytest.approx(
            [token_diversity(seen[f"blocks.{layer}.norm2"][1]).item() for layer in range(4)], rel=1e-5
        )
        odds_before, odds_after = 1 / before - 1, 1 / after - 1
        assert odds_after == pytest.approx(0.6**2 * odds_before, rel=1e-4)  # Eq. 21 scales the mean token by 1 - tau

    def test_is_the_same_before_and_after_without_operator(self, model):
        before, after = diversity(twin(model, tau=0.0), 5)
        assert before == pytest.approx(after, rel=1e-5)


class TestExperiment:
    def test_averages_as_many_runs_as_each_place_has(self):
        curves = experiment({"output": range(2), "attention": range(1)}, taus=[0.4], **SIZES)
        runs = [diversity(twin(random_encoder(seed, **SIZES), tau=0.4), seed) for seed in (0, 1)]
        assert np.array_equal(curves["after the block's last norm"][0.4], np.mean([run[0] for run in runs], axis=0))
        assert np.array_equal(curves[AFTER][0.4], np.mean([run[1] for run in runs], axis=0))
        one = diversity(twin(random_encoder(0, **SIZES), tau=0.4, tau_at="attention"), 0)[0]
        assert np.array_equal(curves["after attention"][0.4], one)


class TestCritical:
    def test_is_where_attention_and_operator_cancel(self):
        assert critical(1.0) == pytest.approx(0.293, abs=5e-4)
        assert all((1 + alpha**2) * (1 - critical(alpha)) ** 2 == pytest.approx(1) for alpha in ALPHAS)


class TestAroundCritical:
    @pytest.fixture(scope="class")
    def rows(self):
        return around_critical(range(1), **SIZES).rows

    def test_expects_growth_below_it_alone(self, rows):
        assert len(rows) == len(ALPHAS) * len(OFFSETS)
        assert all((expected > 1) == (tau < middle) for _, middle, tau, expected, _, _ in rows)

    def test_measures_the_growth_of_the_odds_over_the_second_half(self, rows):
        alpha, _, tau, _, growth, end = rows[0]
        before, _ = diversity(twin(random_encoder(0, **SIZES), alpha=alpha, tau=tau), 0)
        odds = 1 / before - 1
        assert growth == pytest.approx((odds[3] / odds[1]) ** 0.5)
        assert end == pytest.approx(before[3])
