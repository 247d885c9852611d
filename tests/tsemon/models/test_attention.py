import math
from functools import partial

import pytest
import torch

from tests.tsemon.models import written_out
from tests.tsemon.models.written_out import EXACT
from tsemon.errors import InvalidArgument, ShapeError
from tsemon.lab.reproduce.observing import forward, observe
from tsemon.models import Cache, CausalLanguageModel, CausalLanguageModelConfig, SelfAttention, attend


def tensors(queries, keys, heads=4, key_heads=4, value_width=5):
    generator = torch.Generator().manual_seed(1)
    shapes = (2, heads, queries, 5), (2, key_heads, keys, 5), (2, key_heads, keys, value_width)
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0])
class TestAttend:
    @pytest.mark.parametrize(
        "sizes",
        [
            {"queries": 6, "keys": 6},
            {"queries": 3, "keys": 6},
            {"queries": 1, "keys": 6},
            {"queries": 1, "keys": 1},
            {"queries": 6, "keys": 6, "key_heads": 2},
            {"queries": 3, "keys": 6, "key_heads": 1},
            {"queries": 3, "keys": 6, "value_width": 7},
        ],
        ids=str,
    )
    def test_gives_the_same_fused_and_written_out_and_so_do_the_gradients(self, sizes, causal, scale):
        found = []
        for path in ("sdpa", "materialised"):
            inputs = tensors(**sizes)
            output = attend(*inputs, causal=causal, path=path, scale=scale)
            output.square().sum().backward()
            found.append([output, *(x.grad for x in inputs)])
        torch.testing.assert_close(*found, **EXACT)

    def test_takes_the_queries_for_the_last_of_the_tokens(self, causal, scale):
        query, key, value = tensors(queries=6, keys=6)
        whole = attend(query, key, value, causal=causal, scale=scale)
        torch.testing.assert_close(attend(query[:, :, 4:], key, value, causal=causal, scale=scale), whole[:, :, 4:])

    def test_shares_a_key_between_neighbouring_queries(self, causal, scale):
        query, key, value = tensors(queries=6, keys=6, key_heads=2)
        shared = attend(query, key, value, causal=causal, scale=scale)
        for head in range(4):
            one = [x[:, h : h + 1] for x, h in ((query, head), (key, head // 2), (value, head // 2))]
            torch.testing.assert_close(shared[:, head : head + 1], attend(*one, causal=causal, scale=scale))


class TestCausalAttention:
    @pytest.mark.parametrize("path", ["sdpa", "materialised"])
    def test_refuses_a_query_that_would_see_nothing(self, path):
        with pytest.raises(ShapeError, match="got 6 and 3"):
            attend(*tensors(queries=6, keys=3), causal=True, path=path)


@pytest.mark.parametrize("causal", [False, True])
class TestSelfAttention:
    @pytest.mark.parametrize("path", ["sdpa", "materialised"])
    @pytest.mark.parametrize("scale", [None, 1 / math.sqrt(12)])
    def test_equals_the_softmax_written_out(self, x_BTD, causal, scale, path):
        attention = SelfAttention(12, 3, causal, scale=scale, path=path).double()
        expected = torch.stack([written_out.attention(attention, x, causal, scale) for x in x_BTD])
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

    @pytest.mark.parametrize(("width", "heads"), [(12, 5), (12, 0), (0, 1), (4, 8)])
    def test_refuses_heads_that_do_not_divide_the_width(self, causal, width, heads):
        with pytest.raises(InvalidArgument, match=f"width {width} and {heads} heads"):
            SelfAttention(width, heads, causal)

    def test_tells_the_shape_it_was_given(self, causal):
        with pytest.raises(ShapeError, match=r"tokens, 12\), got \(2, 7, 8\)"):
            SelfAttention(12, 3, causal)(torch.ones(2, 7, 8))


class TestMaskingThatMultiplies:
    """Parameter Norm Growth's authors write `scores = scores * mask`, and their softmax gives later tokens e^0."""

    def attention(self, **fields):
        torch.manual_seed(0)
        return SelfAttention(12, 3, causal=True, masking="multiply", **fields).double()

    @pytest.mark.parametrize("path", ["sdpa", "materialised"])
    @pytest.mark.parametrize("scale", [None, 1.0])
    def test_equals_its_equation(self, x_BTD, path, scale):
        attention = self.attention(path=path, scale=scale)
        (weight, bias), (out_weight, out_bias) = (
            tuple(layer.parameters()) for layer in (attention.to_query_key_value, attention.to_output)
        )
        for x, y in zip(x_BTD, attention(x_BTD), strict=True):
            query, key, value = (x @ weight.T + bias).split(12, 1)
            heads = []
            for head in range(3):
                at = slice(4 * head, 4 * head + 4)
                exponentials = torch.ones(len(x), len(x), dtype=torch.float64)
                for i in range(len(x)):
                    for j in range(i + 1):
                        exponentials[i, j] = ((0.5 if scale is None else scale) * query[i, at] @ key[j, at]).exp()
                heads.append(exponentials / exponentials.sum(1, keepdim=True) @ value[:, at])
            torch.testing.assert_close(y, torch.cat(heads, 1) @ out_weight.T + out_bias, **EXACT)

    def test_sees_later_tokens(self, x_BTD):
        attention, changed = self.attention(), x_BTD.clone()
        changed[:, -1] += 1
        assert (attention(changed) - attention(x_BTD))[:, 0].abs().max() > 1e-3
        exclusive = SelfAttention(12, 3, causal=True).double()
        torch.testing.assert_close(exclusive(changed)[:, 0], exclusive(x_BTD)[:, 0], **EXACT)

    def test_goes_on_from_no_cache(self, x_BTD):
        attention, cache = self.attention(), Cache()
        attention(x_BTD[:, :3], cache)
        cache.num_tokens = 3
        with pytest.raises(InvalidArgument, match="without a cache"):
            attention(x_BTD[:, 3:], cache)

    def test_is_for_causal_attention_alone(self, x_BTD):
        heads_BHTK = x_BTD[:, None]
        with pytest.raises(InvalidArgument, match="leave masking='exclude'"):
            attend(heads_BHTK, heads_BHTK, heads_BHTK, causal=False, masking="multiply")

    def test_has_the_weights_that_tsemon_counts(self):
        torch.manual_seed(0)
        config = CausalLanguageModelConfig(
            vocab=20, context=16, depth=2, width=12, heads=3, ffn=24, score_scale=1.0, masking="multiply", norm="branch"
        )
        model = CausalLanguageModel(config)
        run = partial(forward, model, torch.arange(16)[None])
        frame = observe(model, run, measures=["positions_attended"], attention_rows="all")
        assert (frame.heads["positions_attended"] > 15).all(), "with hidden later tokens the mean is at most 8.5"
