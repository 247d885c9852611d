import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests import zoo
from tests.tsemon.probes.attending import (
    MEASURES,
    Attending,
    on_host,
    probed_call,
    reading_of_attention,
    reading_of_call,
)
from tests.tsemon.probes.probing import reading_of
from tsemon.probes.kernels import interface_scores

compiled_flex_attention = torch.compile(flex_attention, backend="eager")


def assert_same(got, expected, names=MEASURES):
    for name in names:
        first, second = on_host(got.layers[name]), on_host(expected.layers[name])
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class Flexible(Attending):
    """Its forward is of this file, so that it finds FlexAttention by the names of this file."""

    def forward(self):
        return self.attend(flex_attention, compiled_flex_attention, flex.flex_attention)


class TestFlexAttention:
    """PyTorch's own refuses to train on a CPU, so its inputs have no gradients here."""

    @pytest.mark.parametrize("called_as", ["a name", "compiled", "of its module"])
    @pytest.mark.parametrize("num_weights", [2**20, 500])
    def test_is_seen_with_its_score_mod_and_its_block_mask(self, called_as, num_weights, monkeypatch):
        monkeypatch.setattr("tsemon.measures.rows.CHUNK_WEIGHTS", num_weights)
        torch.manual_seed(0)
        query, key, value = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
        slopes_H, start_B = torch.tensor([0.5, 0.25, 0.1, 0.05]), torch.tensor([0, 9])

        def alibi(score, b, h, q, k):
            return score - slopes_H[h] * (q - k)

        def causal_and_padded(b, h, q, k):
            return (q >= k) & (k >= start_B[b])

        def attend(named, compiled, of_its_module):
            called = {"a name": named, "compiled": compiled, "of its module": of_its_module}[called_as]
            block_mask = create_block_mask(causal_and_padded, 2, None, 40, 40, device="cpu")
            return called(query, key, value, score_mod=alibi, block_mask=block_mask, enable_gqa=True)

        place = torch.arange(40)
        distance = place[:, None] - place
        visible_BTS = (distance >= 0) & (place >= start_B[:, None, None])
        mask = (
            (-slopes_H[:, None, None] * distance).expand(2, -1, -1, -1).masked_fill(~visible_BTS[:, None], -torch.inf)
        )
        expected = reading_of_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        assert_same(reading_of_call(Flexible(attend)), expected)

    def test_is_put_back_where_it_was(self):
        original, compiled = flex_attention, compiled_flex_attention
        x = torch.randn(1, 2, 16, 8)
        reading_of_call(Flexible(lambda named, *_: named(x, x, x)))
        assert flex.flex_attention is flex_attention is original
        assert compiled_flex_attention is compiled

    def test_is_named_where_it_is_not_seen(self):
        """A function of another file may find it by a name of its own."""
        x = torch.randn(1, 2, 16, 8)
        _, probe = probed_call(Attending(lambda: flex_attention(x, x, x)))
        assert "FlexAttention" in probe.not_measured["attention_entropy"]
        assert "flash-attn" in probe.not_measured["attention_entropy"]


def outside(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """A kernel that PyTorch is told nothing of. Its answer does not matter."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


@pytest.fixture
def llama():
    """A model with one layer, and what makes it call `outside` instead of PyTorch's attention."""
    AttentionInterface.register("outside", outside)
    AttentionMaskInterface.register("outside", AttentionMaskInterface()["flash_attention_2"])
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=100, num_key_value_heads=2, **zoo.SIZES | {"num_hidden_layers": 1})
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(12)  # attention that is far from uniform
    yield model
    AttentionInterface._global_mapping.pop("outside")
    AttentionMaskInterface._global_mapping.pop("outside")


class TestHuggingFaceInterface:
    def by_both(self, model, **inputs):
        model.set_attn_implementation("sdpa")
        expected, _ = reading_of(model, lambda: model(**inputs).logits, measures=MEASURES)
        model.set_attn_implementation("outside")
        got, probe = reading_of(model, lambda: model(**inputs).logits, measures=MEASURES)
        assert probe.not_measured == {}
        assert expected.layers["attention_entropy"][0] < 0.97
        return got, expected

    def test_shows_a_kernel_outside_pytorch(self, llama):
        assert_same(*self.by_both(llama, input_ids=zoo.ids()))
        assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS), "it is put back"

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_shows_its_padding(self, llama, side):
        attention_mask = torch.ones(4, 12, dtype=torch.long)
        attention_mask[1, :5] = attention_mask[3, :2] = 0
        attention_mask = attention_mask if side == "left" else attention_mask.flip(1)
        assert_same(*self.by_both(llama, input_ids=zoo.ids(), attention_mask=attention_mask))

    def test_shows_documents_that_are_packed_into_one_sequence(self, llama):
        position_ids = torch.cat([torch.arange(5), torch.arange(7)])[None]
        assert_same(*self.by_both(llama, input_ids=zoo.ids(1, 12), position_ids=position_ids, use_cache=False))


class TestInterfaceScores:
    """What flash attention is told beside queries and keys."""

    @pytest.mark.parametrize("said", ["by the call", "by the module"])
    def test_knows_a_sliding_window_and_a_soft_cap(self, said):
        torch.manual_seed(0)
        query, key = 3 * torch.randn(2, 1, 2, 20, 8)
        module = nn.Module()
        module.is_causal = said == "by the module"
        arguments = {} if module.is_causal else {"is_causal": True}
        scores = interface_scores(
            query, key, key, None, module=module, scaling=0.5, sliding_window=4, softcap=2.0, dropout=0.1, **arguments
        )
        got, visible = scores.of(slice(0, 1)).at(torch.tensor([3, 11]))
        expected = 2 * torch.tanh(0.5 * query @ key.mT / 2)
        torch.testing.assert_close(got, expected[:, :, [3, 11]])
        assert visible.expand(got.shape)[0, 1].nonzero().tolist() == [
            *([0, key] for key in range(4)),
            *([1, key] for key in range(8, 12)),
        ]

    def test_takes_a_mask_of_four_axes_as_it_is(self):
        query = torch.randn(2, 2, 6, 4, generator=torch.Generator().manual_seed(0))
        mask = torch.zeros(2, 1, 6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
        module = nn.Module()
        module.is_causal = True
        scores = interface_scores(query, query, query, mask, module=module)
        assert not scores.is_causal
        _, visible = scores.of(slice(0, 2)).at(torch.arange(6))
        assert visible[0, 0].tolist() == torch.ones(6, 6, dtype=torch.bool).tril().tolist()
