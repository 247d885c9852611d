import math

import pytest
import torch

from tests import zoo
from tests.tsemon.probes.attending import on_host, reading_of_attention
from tests.tsemon.probes.probing import reading_of
from tsemon.catalogue import TIERS
from tsemon.measures import second_eigenvalue
from tsemon.registration import chosen_measures


def gap_of(query, key, **arguments):
    (gap,) = on_host(
        reading_of_attention(query, key, key, measures={"spectral_gap"}, **arguments).layers["spectral_gap"]
    )
    return gap.item()


def gap_of_weights(weights_HTT):
    return 1 - second_eigenvalue(weights_HTT).mean().item()


class TestSpectralGap:
    def test_is_measured_on_demand_only(self):
        assert TIERS["spectral_gap"] == "demand"
        assert "spectral_gap" not in chosen_measures(None)

    @pytest.mark.parametrize("tokens", [3, 20, 256, 600])
    @pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
    def test_is_that_of_the_matrix(self, tokens, sharpness):
        generator = torch.Generator().manual_seed(0)
        query, key = torch.randn(2, 1, 2, tokens, 16, generator=generator)
        weights = (sharpness * query.double() @ key.double().mT / 4).softmax(-1)
        # 32 steps of Arnoldi's method; second_eigenvalue takes all eigenvalues up to 256 tokens, 96 steps beyond
        assert gap_of(sharpness * query, key) == pytest.approx(gap_of_weights(weights[0]), abs=1e-3)

    @pytest.mark.parametrize("tokens", [256, 512])
    def test_is_within_3_thousandths_where_attention_goes_to_a_few_neighbours(self, tokens):
        """Hundreds of eigenvalues crowd below the largest: the hardest case."""
        places = torch.arange(tokens)
        mask = -((places[:, None] - places) ** 2) / 50.0
        x = torch.zeros(1, 2, tokens, 4)
        exact = torch.linalg.eigvals(mask.double().softmax(-1)).abs().topk(2).values[1]
        assert gap_of(x, x, attn_mask=mask) == pytest.approx(1 - exact.item(), abs=3e-3)

    @pytest.mark.parametrize("said", ["is_causal", "bool mask", "float mask"])
    def test_of_causal_attention_is_read_off_the_diagonal(self, said):
        generator = torch.Generator().manual_seed(0)
        query, key = torch.randn(2, 1, 3, 50, 8, generator=generator)
        lower = torch.ones(50, 50, dtype=torch.bool).tril()
        weights = (query.double() @ key.double().mT / math.sqrt(8)).masked_fill(~lower, -torch.inf).softmax(-1)
        arguments = {
            "is_causal": {"is_causal": True},
            "bool mask": {"attn_mask": lower},
            "float mask": {"attn_mask": torch.zeros(50, 50).masked_fill(~lower, -torch.inf)},
        }[said]
        expected = 1 - weights.diagonal(dim1=-2, dim2=-1)[0, :, 1:].amax(-1).mean().item()
        assert gap_of(query, key, **arguments) == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("is_causal", [True, False])
    def test_leaves_padding_out(self, is_causal):
        generator = torch.Generator().manual_seed(0)
        query, key = torch.randn(2, 1, 2, 14, 8, generator=generator)
        valid = torch.arange(14) >= 5
        mask = valid & (
            torch.ones(14, 14, dtype=torch.bool).tril() if is_causal else torch.ones(14, 14, dtype=torch.bool)
        )
        alone = gap_of(query[:, :, 5:], key[:, :, 5:], is_causal=is_causal)
        padded = gap_of(query, key, attn_mask=mask, attention_mask=valid[None].long())
        assert padded == pytest.approx(alone, abs=1e-6)
        assert 0.01 < alone < 0.99

    def test_of_equal_rows_is_one(self):
        x = torch.ones(1, 2, 10, 4)
        assert gap_of(x, x) == pytest.approx(1, abs=1e-6)

    def test_of_tokens_that_never_mix_is_zero(self):
        x = torch.ones(1, 2, 40, 4)
        assert gap_of(x, x, attn_mask=8e3 * torch.eye(40)) == pytest.approx(0, abs=1e-6)

    def test_of_documents_is_that_of_the_first(self):
        generator = torch.Generator().manual_seed(0)
        query, key = torch.randn(2, 1, 2, 14, 8, generator=generator)
        documents = torch.arange(14) >= 5
        packed = gap_of(query, key, attn_mask=documents == documents[:, None])
        assert packed == pytest.approx(gap_of(query[:, :, :5], key[:, :, :5]), abs=1e-6)

    def test_of_layers_with_and_without_a_mask_stand_side_by_side(self):
        model, forward = zoo.our_language_model()
        model.blocks[1].attention.causal = False
        reading, _ = reading_of(model, forward, measures={"spectral_gap"})
        assert on_host(reading.layers["spectral_gap"]).isfinite().all()
