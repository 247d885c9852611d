import math

import pytest
import torch

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import DeEscalatedBlock, DeEscalation, FeedForward, PostNormBlock, SelfAttention

# Two orders of float64 operations on numbers near 1, some tens of operations deep.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def x_BTD():
    return torch.randn(3, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def attention_written_out(attention, x):
    """P X W for one sequence x (T, D), head by head, softmax by hand."""
    tokens, width = x.shape
    size = width // attention.heads
    query, key, value = (x @ attention.to_query_key_value.weight.T + attention.to_query_key_value.bias).split(width, 1)
    heads = []
    for head in range(attention.heads):
        cut = slice(head * size, (head + 1) * size)
        rows = []
        for i in range(tokens):
            seen = i + 1 if attention.causal else tokens
            weights = (query[i, cut] @ key[:seen, cut].T / math.sqrt(size)).exp()
            rows.append(weights / weights.sum() @ value[:seen, cut])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1) @ attention.to_output.weight.T + attention.to_output.bias


def norm_written_out(norm, x):
    centred = x - x.mean(1, keepdim=True)
    return norm.weight * centred / (centred.square().mean(1, keepdim=True) + norm.eps).sqrt() + norm.bias


def feed_forward_written_out(network, x):
    hidden = x @ network.expand.weight.T + network.expand.bias
    return (hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2) @ network.contract.weight.T + network.contract.bias


def algorithm_1(block, x):
    y1 = x + block.alpha * attention_written_out(block.attention, x)
    y2 = norm_written_out(block.norm1, y1)
    y3 = y2 + feed_forward_written_out(block.feed_forward, y2)
    return norm_written_out(block.norm2, y3)


def averaging_matrix(tokens, causal):
    """P of Eq. 21, or its lower triangular form."""
    ones = torch.ones(tokens, tokens, dtype=torch.float64)
    ones = ones.tril() if causal else ones
    return ones / ones.sum(1, keepdim=True)


def shared_energy_ratio(x_BTD):
    return x_BTD.mean(1).square().sum() * x_BTD.shape[1] / x_BTD.square().sum()


@pytest.mark.parametrize("causal", [False, True])
class TestSelfAttention:
    def test_equals_the_softmax_written_out(self, x_BTD, causal):
        attention = SelfAttention(12, 3, causal).double()
        expected = torch.stack([attention_written_out(attention, x) for x in x_BTD])
        torch.testing.assert_close(attention(x_BTD), expected, **EXACT)

    def test_is_looked_up_when_called_so_that_it_can_be_watched(self, x_BTD, causal, monkeypatch):
        seen = []
        original = torch.nn.functional.scaled_dot_product_attention

        def watch(query, key, value, **options):
            seen.append((tuple(query.shape), options))
            return original(query, key, value, **options)

        attention = SelfAttention(12, 3, causal).double()
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
        attention(x_BTD)
        assert seen == [((3, 3, 7, 4), {"is_causal": causal})]


class TestSizesThatDoNotFit:
    @pytest.mark.parametrize(("width", "heads"), [(12, 5), (12, 0), (0, 1), (4, 8)])
    def test_heads_must_divide_the_width(self, width, heads):
        with pytest.raises(InvalidArgument, match=f"width {width} and {heads} heads"):
            SelfAttention(width, heads)

    def test_the_input_has_the_width_of_the_block(self):
        with pytest.raises(ShapeError, match=r"tokens, 12\), got \(2, 7, 8\)"):
            PostNormBlock(12, 3, 24)(torch.ones(2, 7, 8))

    def test_the_feed_forward_network_is_not_empty(self):
        with pytest.raises(InvalidArgument, match="got 0"):
            FeedForward(12, 0)

    @pytest.mark.parametrize("tau", [-0.1, 1.1, math.nan])
    def test_tau_is_a_share(self, tau):
        with pytest.raises(InvalidArgument, match=f"from 0 to 1, got {tau}"):
            DeEscalation(tau)


@pytest.mark.parametrize("causal", [False, True])
class TestPostNormBlock:
    @pytest.mark.parametrize("alpha", [1.0, 0.3])
    def test_equals_algorithm_1_written_out(self, x_BTD, causal, alpha):
        block = PostNormBlock(12, 3, 24, alpha=alpha, causal=causal).double()
        torch.testing.assert_close(block(x_BTD), torch.stack([algorithm_1(block, x) for x in x_BTD]), **EXACT)

    def test_mixes_no_tokens_when_alpha_is_zero(self, x_BTD, causal):
        block = PostNormBlock(12, 3, 24, alpha=0.0, causal=causal).double()
        alone = block(x_BTD[:, :1])
        torch.testing.assert_close(block(x_BTD)[:, :1], alone, **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tau", [0.0, 0.4, 1.0])
class TestDeEscalation:
    def test_equals_equation_21_written_out(self, x_BTD, causal, tau):
        expected = torch.stack([x - tau * averaging_matrix(7, causal) @ x for x in x_BTD])
        torch.testing.assert_close(DeEscalation(tau, causal)(x_BTD), expected, **EXACT)

    def test_ends_the_block_and_adds_no_parameter(self, x_BTD, causal, tau):
        block = DeEscalatedBlock(12, 3, 24, tau, causal=causal).double()
        classic = PostNormBlock(12, 3, 24, causal=causal).double()
        classic.load_state_dict(block.state_dict())
        torch.testing.assert_close(block(x_BTD), DeEscalation(tau, causal)(classic(x_BTD)), rtol=0, atol=0)

    def test_keeps_half_precision(self, x_BTD, causal, tau):
        x_BTD = x_BTD.bfloat16()
        y_BTD = DeEscalation(tau, causal)(x_BTD)
        assert y_BTD.dtype == torch.bfloat16
        # bfloat16 keeps 8 bits; the mean and the difference of numbers up to 4 are each rounded once.
        torch.testing.assert_close(y_BTD.double(), DeEscalation(tau, causal)(x_BTD.double()), rtol=2**-7, atol=2**-6)


class TestDeEscalationOfWholeSequences:
    def test_divides_token_similarity_as_the_equation_says(self, x_BTD):
        x_BTD = x_BTD[:1] + 2  # s is a ratio of sums, so one sequence
        s = shared_energy_ratio(x_BTD)
        kept = (1 - 0.4) ** 2 * s
        torch.testing.assert_close(shared_energy_ratio(DeEscalation(0.4)(x_BTD)), kept / (kept + 1 - s), **EXACT)

    def test_leaves_no_similarity_at_tau_1(self, x_BTD):
        block = DeEscalatedBlock(12, 3, 24).double()
        before = {}
        block.deescalation.register_forward_hook(lambda _, inputs, __: before.update(x=inputs[0]))
        after = block(x_BTD)
        assert shared_energy_ratio(before["x"]) > 0.01
        assert shared_energy_ratio(after) < 1e-28  # the square of float64's rounding, with room


class TestDeEscalationByPrefixMeans:
    def test_turns_the_first_token_into_zeros_at_tau_1(self, x_BTD):
        y_BTD = DeEscalation(1.0, causal=True)(x_BTD)
        assert (y_BTD[:, 0] == 0).all()
        assert (y_BTD[:, 1:] != 0).all()

    def test_sums_long_bfloat16_sequences_in_float32(self):
        equal_BTD = torch.full((1, 2000, 1), 1.5, dtype=torch.bfloat16)
        assert (DeEscalation(1.0, causal=True)(equal_BTD) == 0).all()  # a bfloat16 sum would be off by up to 2^-9
