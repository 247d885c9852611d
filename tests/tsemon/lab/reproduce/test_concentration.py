import numpy as np
import pytest
import torch

from tsemon.lab.reproduce.concentration import drawn, experiment, softmax_attention


class TestSoftmaxAttention:
    def test_is_eq_2(self):
        query_TD, key_TD = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
        expected = torch.softmax(query_TD @ key_TD.T / 2, dim=1)  # sqrt(4)
        torch.testing.assert_close(softmax_attention(query_TD, key_TD), expected)


class TestDrawn:
    def test_leaves_what_tokens_do_not_share_where_attention_is_uniform(self):
        x_TD = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
        xi_1_N, xi_2_N = drawn(x_TD, torch.full((9, 9), 1 / 9), 4000, torch.Generator().manual_seed(1))
        torch.testing.assert_close(xi_2_N, torch.ones(4000), rtol=1e-4, atol=0)
        # |v + W'v|^2 / |v|^2 has mean 2 and variance 6/d, of 4000 draws within four standard errors
        assert xi_1_N.mean().item() == pytest.approx(2, abs=4 * (6 / 4 / 4000) ** 0.5)
        assert xi_1_N.var().item() == pytest.approx(6 / 4, rel=0.2)  # heavy tails: the variance of a variance


class TestExperiment:
    def test_loses_the_noise_of_the_draws_near_rank_one_with_sample_means_alone(self):
        eta = experiment(10, np.array([1e-3]), many=2000)
        assert abs(eta.sampled_S[0]) < 1e-4
        assert abs(eta.expected_S[0]) < 4 * eta.spread_S[0] / 2000**0.5
        assert eta.spread_S[0] == pytest.approx((6 / 10) ** 0.5, rel=0.2)
