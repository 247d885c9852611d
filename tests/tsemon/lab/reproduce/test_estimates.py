import numpy as np
import pytest
import torch

from tsemon.lab.reproduce.estimates import CHUNK, claims, drawn, experiment
from tsemon.measures import mu_squared


@pytest.fixture
def tokens_and_attention():
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(12, 32, generator=generator)
    return x_TD, torch.softmax(torch.randn(4, 12, 12, generator=generator), dim=-1)


class TestDrawn:
    def test_has_the_expected_values_of_lemma_16(self, tokens_and_attention):
        x_TD, p_HTT = tokens_and_attention
        mu_1_squared, mu_2_squared = mu_squared(x_TD, p_HTT)
        ratio_N, _ = drawn(x_TD, p_HTT, 1000, torch.Generator().manual_seed(1))
        expected = ((1 + mu_1_squared) / (1 + mu_2_squared)).item()
        # Four standard errors of the mean, and for E[eta], which is of order 1/(T D), 0.01
        assert ratio_N.mean().item() == pytest.approx(expected, abs=4 * ratio_N.std().item() / 1000**0.5 + 0.01)

    def test_obeys_proposition_3_in_each_draw(self, tokens_and_attention):
        x_TD, p_HTT = tokens_and_attention
        ratio_N, rate_N = drawn(x_TD, p_HTT, CHUNK + 3, torch.Generator().manual_seed(1))
        shared = (x_TD.mean(dim=0).square().sum() * 12 / x_TD.square().sum()).item()
        assert len(rate_N) == CHUNK + 3
        torch.testing.assert_close(rate_N, 1 + (ratio_N - 1) * shared)


class TestExperiment:
    def test_orders_the_estimates_as_theory_has_it(self):
        found = experiment(3, depth=2, width=64, heads=4, ffn=64)
        # (1 - omega)^2 <= mu_1^2 and mu_2^2 <= delta^2 (Eq. 11), in every head
        assert (found["Estimate 1, factor"] < found["Eq. 13, factor"]).all()
        by_rate = (found["Eq. 13, r"] - 1) / found["token similarity"]
        assert found["Eq. 13, factor"] == pytest.approx(by_rate, rel=1e-6)
        assert {len(values) for values in found.values()} == {2}


class TestTheVerdicts:
    @pytest.mark.parametrize(
        ("eq_13", "first", "second", "expected"),
        [
            (1.0, 0.5, 0.9, ["yes", "yes", "yes", "yes"]),
            (2.0, 1.5, 1.9, ["no", "no", "no", "no"]),
            (1.0, 1.0, 1.0, ["yes", "yes", "no", "yes"]),  # nothing to tell the two apart by
        ],
    )
    def test_hold_the_estimates_against_the_draws(self, eq_13, first, second, expected):
        factors = {"Eq. 13": eq_13, "Estimate 1": first, "Estimate 2": second}
        found = {"xi_1/xi_2 - 1": 1.0, "standard error": 0.01, "r": 1.08} | {
            f"{name}, {what}": value
            for name, factor in factors.items()
            for what, value in (("factor", factor), ("r", 1 + 0.08 * factor))
        }
        found["Estimate 2, r"] += 0.1 * (second > 1)
        found["Estimate 1, r"] += 0.1 * (first > 1)
        blocks = {name: np.full(3, value) for name, value in found.items()}
        assert [claim.agrees for claim in claims(blocks, draws=10)] == expected
