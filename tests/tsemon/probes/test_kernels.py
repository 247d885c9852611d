import sys
import types

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
from tsemon.measures.rows import highest
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
        few_rows = reading_of_call(Flexible(attend), rows=8)
        assert_same(few_rows, expected, ["max_attention_logit"])

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


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """With the arguments of flash-attn, which runs on GPUs alone."""
    return q


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    return qkv[:, :, 0]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
):  # fmt: skip
    return q


class Flashing(Attending):
    """Its forward is of this file, so that it finds the kernels by the names of this file."""

    def forward(self):
        return self.attend(flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func)


@pytest.fixture
def flash_attn(monkeypatch):
    package = types.ModuleType("flash_attn")
    for function in (flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func):
        setattr(package, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flash_attn", package)


def mask_of(num_queries, num_keys, left=-1, right=-1):
    """Of a window, counted from the last query, which is at the last key."""
    ahead = torch.arange(num_keys) - num_keys - torch.arange(num_queries)[:, None] + num_queries
    return ((right < 0) | (ahead <= right)) & ((left < 0) | (-ahead <= left))


@pytest.mark.usefixtures("flash_attn")
class TestFlashAttention:
    @pytest.mark.parametrize(
        ("given", "window"),
        [
            ({}, {}),
            ({"causal": True}, {"right": 0}),
            ({"window_size": (4, 2)}, {"left": 4, "right": 2}),
            ({"causal": True, "window_size": (4, 0), "softmax_scale": 0.7}, {"left": 4, "right": 0}),
        ],
    )
    def test_is_seen_with_its_window(self, given, window):
        torch.manual_seed(0)
        query, key, value = torch.randn(2, 40, 4, 8), torch.randn(2, 40, 2, 8), torch.randn(2, 40, 2, 8)
        found = reading_of_call(Flashing(lambda call, *_: call(query, key, value, **given)))
        by_torch = (x.transpose(1, 2) for x in (query, key, value))
        mask, scale = mask_of(40, 40, **window), given.get("softmax_scale")
        assert_same(found, reading_of_attention(*by_torch, attn_mask=mask, enable_gqa=True, scale=scale))

    def test_of_fewer_queries_than_keys_ends_at_the_last_key(self):
        torch.manual_seed(0)
        query, key, value = torch.randn(2, 20, 4, 8), torch.randn(2, 40, 4, 8), torch.randn(2, 40, 4, 8)
        found = reading_of_call(Flashing(lambda call, *_: call(query, key, value, causal=True)))
        by_torch = (x.transpose(1, 2) for x in (query, key, value))
        assert_same(
            found, reading_of_attention(*by_torch, attn_mask=mask_of(20, 40, right=0)), MEASURES - {"spectral_gap"}
        )

    def test_of_queries_keys_and_values_in_one(self):
        torch.manual_seed(0)
        packed = torch.randn(2, 40, 3, 4, 8)
        found = reading_of_call(Flashing(lambda _, call, *__: call(packed, causal=True)))
        assert_same(found, reading_of_attention(*(x.transpose(1, 2) for x in packed.unbind(2)), is_causal=True))

    def test_is_seen_within_documents(self):
        torch.manual_seed(0)
        query, key, value = (torch.randn(40, 4, 8) for _ in range(3))
        starts = torch.tensor([0, 7, 16, 40], dtype=torch.int32)
        found = reading_of_call(
            Flashing(lambda *calls: calls[2](query, key, value, starts, starts, 24, 24, causal=True))
        )
        number = torch.searchsorted(starts.long(), torch.arange(40), right=True)
        mask = mask_of(40, 40, right=0) & (number[:, None] == number)
        assert_same(
            found, reading_of_attention(*(x.transpose(0, 1)[None] for x in (query, key, value)), attn_mask=mask)
        )

    def test_of_an_older_pytorch_is_causal_by_a_flag(self, monkeypatch):
        def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
            return query

        package = types.ModuleType("torch.nn.attention.varlen")
        package.varlen_attn = varlen_attn
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", package)
        monkeypatch.setitem(globals(), "varlen_attn", varlen_attn)
        torch.manual_seed(0)
        query, key, value = (torch.randn(40, 4, 8) for _ in range(3))
        starts = torch.tensor([0, 40], dtype=torch.int32)
        call = lambda *_: globals()["varlen_attn"](query, key, value, starts, starts, 40, 40, is_causal=True)  # noqa: E731
        heads_first = (x.transpose(0, 1)[None] for x in (query, key, value))
        assert_same(reading_of_call(Flashing(call)), reading_of_attention(*heads_first, is_causal=True))

    def test_with_a_bias_that_is_not_read_is_not_measured(self):
        x, starts = torch.randn(40, 4, 8), torch.tensor([0, 40], dtype=torch.int32)
        _, probe = probed_call(Flashing(lambda *calls: calls[2](x, x, x, starts, starts, 40, 40, alibi_slopes=starts)))
        assert "called no function that tsemon knows" in probe.not_measured["attention_entropy"]


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
        is_near_TT = torch.ones(20, 20, dtype=torch.bool).tril().triu(-3)
        found_BH = highest(scores, 1, torch.ones(1, 20, dtype=torch.bool))
        torch.testing.assert_close(found_BH, expected.masked_fill(~is_near_TT, -torch.inf).amax(dim=(2, 3)))

    def test_takes_a_mask_of_four_axes_as_it_is(self):
        query = torch.randn(2, 2, 6, 4, generator=torch.Generator().manual_seed(0))
        mask = torch.zeros(2, 1, 6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
        module = nn.Module()
        module.is_causal = True
        scores = interface_scores(query, query, query, mask, module=module)
        assert not scores.is_causal
        _, visible = scores.of(slice(0, 2)).at(torch.arange(6))
        assert visible[0, 0].tolist() == torch.ones(6, 6, dtype=torch.bool).tril().tolist()
