import math

import pytest
import torch

from tsemon.measures import effective_rank, token_statistics
from tsemon.measures.spectra import batch_gram, effective_ranks, token_gram

TOLERANCE = {"rtol": 2e-4, "atol": 0.0}
"""The Gram matrix squares singular values: those that are 0 come out as up to 3e-8 of the largest, 256 of them at most."""


def rank_of_tokens(x_BTD, valid_BT=None):
    stats = token_statistics(x_BTD, valid_BT)
    counts_B = stats.largest.isfinite() & (stats.count > 0)
    return effective_ranks(token_gram(x_BTD, valid_BT, stats.unit, counts_B)[None])[0]


class TestEffectiveRankOfTokens:
    @pytest.mark.parametrize(("tokens", "width"), [(1, 8), (12, 8), (8, 12), (256, 300), (300, 256), (200, 16)])
    @pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6, 0.0])
    def test_equals_the_measure(self, tokens, width, spread):
        """Down to where the tokens are all the same."""
        torch.manual_seed(0)
        x_BTD = torch.randn(1, 1, width) + spread * torch.randn(1, tokens, width)
        rows = (torch.arange(256) * 2 + 1) * tokens // 512 if tokens > 256 else torch.arange(tokens)
        torch.testing.assert_close(rank_of_tokens(x_BTD), effective_rank(x_BTD[0, rows]), **TOLERANCE)

    @pytest.mark.parametrize("scale", [1e-20, 1e20])
    def test_does_not_depend_on_the_scale(self, scale):
        torch.manual_seed(0)
        x_BTD = torch.randn(1, 12, 8)
        torch.testing.assert_close(rank_of_tokens(x_BTD * scale), effective_rank(x_BTD[0]), **TOLERANCE)

    @pytest.mark.parametrize("padding", ["left", "right"])
    def test_is_that_of_the_valid_tokens(self, padding):
        torch.manual_seed(0)
        x_BTD = torch.randn(1, 12, 16)
        valid_BT = torch.arange(12)[None] >= 5 if padding == "left" else torch.arange(12)[None] < 7
        got = rank_of_tokens(torch.where(valid_BT[..., None], x_BTD, math.nan), valid_BT)
        torch.testing.assert_close(got, effective_rank(x_BTD[valid_BT]), **TOLERANCE)

    def test_is_undefined_for_zeros_and_for_what_is_not_finite(self):
        assert rank_of_tokens(torch.zeros(2, 5, 8)).isnan()
        assert rank_of_tokens(torch.full((2, 5, 8), math.inf)).isnan()

    def test_takes_half_precision(self):
        torch.manual_seed(0)
        x_BTD = torch.randn(1, 12, 16).bfloat16()
        torch.testing.assert_close(rank_of_tokens(x_BTD), effective_rank(x_BTD[0].float()), **TOLERANCE)


class TestEffectiveRankOfABatch:
    @pytest.mark.parametrize("batch", [2, 8, 300])
    def test_equals_the_measure_of_the_centred_means(self, batch):
        torch.manual_seed(0)
        mean_BD = torch.randn(batch, 16)
        got = effective_ranks(batch_gram(mean_BD, torch.ones(batch, dtype=torch.bool))[None])[0]
        rows = (torch.arange(256) * 2 + 1) * batch // 512 if batch > 256 else torch.arange(batch)
        chosen = mean_BD[rows]
        torch.testing.assert_close(got, effective_rank(chosen - chosen.mean(dim=0)), **TOLERANCE)

    def test_leaves_out_what_does_not_count(self):
        torch.manual_seed(0)
        mean_BD = torch.randn(6, 16)
        counts_B = torch.tensor([True, False, True, True, False, True])
        kept = mean_BD[counts_B]
        got = effective_ranks(batch_gram(mean_BD, counts_B)[None])[0]
        torch.testing.assert_close(got, effective_rank(kept - kept.mean(dim=0)), **TOLERANCE)

    def test_is_undefined_where_all_are_the_same(self):
        assert effective_ranks(
            batch_gram(torch.randn(1, 16).expand(5, 16), torch.ones(5, dtype=torch.bool))[None]
        ).isnan()
