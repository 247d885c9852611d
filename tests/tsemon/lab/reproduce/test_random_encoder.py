import pytest
import torch

from tsemon.lab.reproduce.observing import forward
from tsemon.lab.reproduce.random_encoder import caught, head_mix, random_encoder, random_tokens, twin

SIZES = {"depth": 2, "width": 32, "heads": 4, "ffn": 64}
X_BTD = random_tokens(0, 32, num_tokens=10)


@pytest.fixture
def model():
    return random_encoder(0, **SIZES)


@pytest.fixture
def seen(model):
    with caught(model) as seen:
        forward(model, X_BTD)
    return seen


def attention_by_hand(model, x_TD, scale):
    """P of every head, (H, T, T), from the first block's weights."""
    to_query, to_key, _ = model.blocks[0].attention.to_query_key_value.weight.split(32)
    query_HTK, key_HTK = ((x_TD @ weight.T).view(10, 4, 8).transpose(0, 1) for weight in (to_query, to_key))
    return torch.softmax(scale * query_HTK @ key_HTK.mT, dim=-1)


class TestRandomEncoder:
    def test_attends_as_proposition_9_has_it(self, model, seen):
        x_TD = X_BTD[0]
        p_HTT = attention_by_hand(model, x_TD, 8**-0.5)
        value = model.blocks[0].attention.to_query_key_value.weight[64:].T  # W = [W_1 ... W_4]
        y_TD = x_TD + torch.cat([p @ x_TD @ w for p, w in zip(p_HTT, value.split(8, dim=1), strict=True)], dim=1)
        torch.testing.assert_close(seen["blocks.0.norm1"][0][0], y_TD)

    def test_draws_w_with_variance_one_over_d_and_queries_uniformly(self):
        weight = random_encoder(0, depth=1, width=256, heads=4, ffn=4).blocks[0].attention.to_query_key_value.weight
        # 65,536 draws: the standard deviation of N(0, s) is known to s / 362
        assert weight[512:].std().item() == pytest.approx(256**-0.5, rel=0.01)
        assert weight[:512].abs().max().item() == pytest.approx(256**-0.5, rel=0.001)

    def test_is_the_same_for_the_same_seed_alone(self, model):
        weights = [random_encoder(seed, **SIZES).blocks[1].feed_forward.expand.weight for seed in (0, 1)]
        assert torch.equal(weights[0], model.blocks[1].feed_forward.expand.weight)
        assert not torch.equal(weights[1], weights[0])


class TestTwin:
    def test_has_the_weights_and_other_rules(self, model):
        other = twin(model, causal=True)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(one.data_ptr() == another.data_ptr() for one, another in pairs)
        assert other.blocks[0].attention.causal
        assert not model.blocks[0].attention.causal


class TestHeadMix:
    def test_is_attention_itself_without_tokens(self, model, seen):
        p_BHTT = head_mix(model.blocks[0].attention, seen["blocks.0.attention.to_query_key_value"][1])
        torch.testing.assert_close(p_BHTT[0], attention_by_hand(model, X_BTD[0], 8**-0.5))

    def test_follows_the_scale_and_the_mask(self, model):
        other = twin(model, causal=True, score_scale=0.1)
        with caught(other) as seen:
            forward(other, X_BTD)
        p_HTT = head_mix(other.blocks[0].attention, seen["blocks.0.attention.to_query_key_value"][1])[0]
        expected = attention_by_hand(model, X_BTD[0], 0.1).tril()
        torch.testing.assert_close(p_HTT, expected / expected.sum(dim=-1, keepdim=True))

    def test_mixes_the_tokens_of_every_head(self, model, seen):
        query_key_value = seen["blocks.0.attention.to_query_key_value"][1]
        p_BHTT = head_mix(model.blocks[0].attention, query_key_value)
        mixed_BHTD = head_mix(model.blocks[0].attention, query_key_value, X_BTD)
        torch.testing.assert_close(mixed_BHTD, p_BHTT @ X_BTD[:, None])


class TestCaught:
    def test_leaves_no_hook_behind(self, model):
        with pytest.raises(KeyError), caught(model):
            raise KeyError
        assert not any(module._forward_hooks for module in model.modules())
