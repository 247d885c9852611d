"""An experiment finds the rows that make queries and keys: those on which both of the attention call depend."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tests import zoo
from tsemon.probes import find_blocks
from tsemon.probes.query_key import queries_and_keys

SIZES = {**zoo.SIZES, "vocab_size": 100}
MLA = {**SIZES, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10, "head_dim": 4}
MLA |= {"first_k_dense_replace": 3, "num_key_value_heads": 4, "moe_intermediate_size": 8, "n_routed_experts": 4}
FALCON = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
BIGCODE = {"vocab_size": 100, "n_embd": 32, "n_head": 4, "n_layer": 2}

HUGGING_FACE = {
    "DeepSeek-V3": ("DeepseekV3", {**MLA, "q_lora_rank": 14, "n_group": 1, "topk_group": 1}),
    "DeepSeek-V2, queries in one step": ("DeepseekV2", {**MLA, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "Falcon": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon, multi-query": ("Falcon", {**FALCON, "multi_query": True, "new_decoder_architecture": False}),
    "Falcon, by head": ("Falcon", {**FALCON, "multi_query": False, "alibi": True, "bias": True}),
    "StarCoder, multi-query": ("GPTBigCode", {**BIGCODE, "multi_query": True}),
    "StarCoder, by head": ("GPTBigCode", {**BIGCODE, "multi_query": False}),
    "Phi-3": ("Phi3", {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}),
    "Persimmon": ("Persimmon", SIZES),
    "GPT-NeoX": ("GPTNeoX", SIZES),
    "GPT-2": ("GPT2", {"vocab_size": 100, "n_embd": 32, "n_head": 4, "n_layer": 2}),
    "Gemma 3": ("Gemma3Text", {**SIZES, "num_key_value_heads": 2, "head_dim": 16}),
    "ModernBERT": ("ModernBert", {**SIZES, "pad_token_id": 0}),
}


def dependent(model, forward, attention, monkeypatch):
    """Of each parameter of the attention where its queries and keys depend on it; those of norms left out."""
    calls, is_inside = [], []
    handles = [
        attention.register_forward_pre_hook(lambda *_: is_inside.append(True)),
        attention.register_forward_hook(lambda *_: is_inside.clear()),
    ]
    attend = F.scaled_dot_product_attention

    def seen(query, key, value, **kwargs):
        if is_inside:
            calls.append((query, key))
        return attend(query, key, value, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    forward(model)
    for handle in handles:
        handle.remove()
    ((query, key),) = calls
    # Squares, as sums over a softmax-free product could vanish for a rotation.
    made_of = query.square().sum() + key.square().sum()
    named = {name: p for name, p in attention.named_parameters() if "norm" not in name}
    gradients = torch.autograd.grad(made_of, list(named.values()), allow_unused=True)
    found = {name: g for name, g in zip(named, gradients, strict=True) if g is not None and g.any()}
    return {
        name: (g != 0) if g.ndim == 1 else (g != 0).any(_input_axis(attention, name), keepdim=True).expand_as(g)
        for name, g in found.items()
    }


def _input_axis(attention, name):
    return 0 if type(attention.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D" else -1


def told(attention):
    """The same by what tsemon says."""
    found = queries_and_keys(attention)
    assert not isinstance(found, str), found
    masks = {}
    for name, parameter in attention.named_parameters():
        mask = torch.zeros_like(parameter, dtype=torch.bool)
        for slices in found:
            if slices.parameter is parameter:
                for part in slices.of(mask):
                    assert not part.any(), "counted twice"
                    part.fill_(True)
        if mask.any():
            masks[name] = mask
    return masks


def assert_told(model, forward, attention, monkeypatch):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape))  # biases, too: they begin as zeros
    expected, got = dependent(model, forward, attention, monkeypatch), told(attention)
    assert got.keys() == expected.keys()
    for name, mask in expected.items():
        assert torch.equal(got[name], mask), name


class TestQueriesAndKeysOfHuggingFace:
    @pytest.mark.parametrize("name", HUGGING_FACE)
    def test_are_what_the_attention_call_depends_on(self, name, monkeypatch):
        family, settings = HUGGING_FACE[name]
        config = getattr(transformers, f"{family}Config")(**settings)
        kind = next(
            k for k in (f"{family}ForCausalLM", f"{family}LMHeadModel", f"{family}Model") if hasattr(transformers, k)
        )
        model = getattr(transformers, kind)._from_config(config, attn_implementation="sdpa").eval()
        attention = find_blocks(model)[1].attention
        assert_told(model, lambda model: model(zoo.ids()), attention, monkeypatch)


class Attention(nn.Module):
    """Of 4 query heads and 2 key heads of width 8, with projections as the frameworks name and pack them."""

    def __init__(self, split, **projections):
        super().__init__()
        self.split = split
        for name, module in projections.items():
            self.add_module(name, module)

    def forward(self, x_BTD):
        query, key, value = (y.unflatten(-1, (-1, width)).transpose(1, 2) for y, width in self.split(self, x_BTD))
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2).flatten(2)


def separate(names):
    def split(self, x):
        return [(self.get_submodule(name)(x), 8) for name in names]

    return split


def grouped(name):
    def split(self, x):
        groups = self.get_submodule(name)(x).unflatten(-1, (2, 4, 8))  # two queries, a key and a value of each group
        return [(part.flatten(-3), 8) for part in (groups[..., :2, :], groups[..., 2:3, :], groups[..., 3:, :])]

    return split


def in_sequence(name):
    def split(self, x):
        return [(part, 8) for part in self.get_submodule(name)(x).split([32, 16, 16], dim=-1)]

    return split


def latent(queries, down, up):
    def split(self, x):
        query = x
        for name in queries:
            query = self.get_submodule(name)(query)
        content, rotary = self.get_submodule(down)(x).split([12, 4], dim=-1)
        key, value = self.get_submodule(up)(content).unflatten(-1, (4, 16)).split([6, 10], dim=-1)
        key = torch.cat([key, rotary[..., None, :].expand(*key.shape[:-1], -1)], dim=-1)
        return [(query, 10), (key.flatten(-2), 10), (value.flatten(-2), 10)]

    return split


def mla(queries, down, up):
    widths = [32, 14, 40] if len(queries) == 2 else [32, 40]
    layers = {name: nn.Linear(*pair) for name, pair in zip(queries, itertools.pairwise(widths), strict=True)}
    attention = Attention(latent(queries, down, up), **layers, **{down: nn.Linear(32, 16), up: nn.Linear(12, 64)})
    attention.qk_nope_head_dim, attention.v_head_dim = 6, 10
    return attention


def megatron_mla():
    attention = mla(["linear_q_down_proj", "linear_q_up_proj"], "linear_kv_down_proj", "linear_kv_up_proj")
    del attention.qk_nope_head_dim, attention.v_head_dim
    attention.config = SimpleNamespace(qk_head_dim=6, v_head_dim=10, num_attention_heads=4)
    return attention


def megatron():
    attention = Attention(grouped("linear_qkv"), linear_qkv=nn.Linear(32, 64), linear_proj=nn.Linear(32, 32))
    attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition = 4, 2
    attention.hidden_size_per_attention_head = 8
    return attention


class FusedQKVLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(32, 64)
        self.head_dim = 8


def titan():
    attention = Attention(grouped("qkv_linear.wqkv"), qkv_linear=FusedQKVLinear(), wo=nn.Linear(32, 32))
    attention.n_heads, attention.n_kv_heads = 4, 2
    return attention


def litgpt():
    attention = Attention(in_sequence("qkv"), qkv=nn.Linear(32, 64), proj=nn.Linear(32, 32))
    attention.config = SimpleNamespace(n_head=4, n_query_groups=2, head_size=8)
    return attention


def vit_pytorch():
    """Its heads are wider than the model."""

    def split(self, x):
        return [(part, 16) for part in self.to_qkv(x).chunk(3, dim=-1)]

    attention = Attention(split, to_qkv=nn.Linear(32, 192, bias=False), to_out=nn.Linear(64, 32))
    attention.heads = 4
    return attention


def beit():
    """Its biases stand by themselves, and keys have none."""

    def split(self, x):
        bias = torch.cat([self.q_bias, torch.zeros(32), self.v_bias])
        return [(part, 8) for part in (self.qkv(x) + bias).chunk(3, dim=-1)]

    attention = Attention(split, qkv=nn.Linear(32, 96, bias=False))
    attention.q_bias, attention.v_bias = nn.Parameter(torch.zeros(32)), nn.Parameter(torch.zeros(32))
    return attention


def keys_with_values():
    def split(self, x):
        return [(part, 8) for part in (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))]

    return Attention(split, to_q=nn.Linear(32, 32), to_kv=nn.Linear(32, 64))


def of_lora():
    """An adapter of peft around a packed projection."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(32, 64)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 3, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(3, 64, bias=False)})

        def forward(self, x):
            return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    attention = litgpt()
    attention.qkv = Adapted()
    return attention


def by_names(*names, container=None):
    def make():
        widths = dict(zip(names, (32, 16, 16), strict=True))
        layers = {name: nn.Linear(32, width) for name, width in widths.items()}
        if container is None:
            return Attention(separate(names), **layers)
        inner = nn.ModuleDict(layers)
        return Attention(separate([f"{container}.{name}" for name in names]), **{container: inner})

    return make


FRAMEWORKS = {
    "Megatron-LM": megatron,
    "Megatron-LM, MLA": megatron_mla,
    "torchtitan": by_names("wq", "wk", "wv", container="qkv_linear"),
    "torchtitan, fused": titan,
    "torchtitan, MLA": lambda: mla(["wq_a", "wq_b"], "wkv_a", "wkv_b"),
    "torchtitan, MLA with queries in one step": lambda: mla(["wq"], "wkv_a", "wkv_b"),
    "OLMo-core": by_names("w_q", "w_k", "w_v"),
    "nanochat": by_names("c_q", "c_k", "c_v"),
    "litgpt": litgpt,
    "vit-pytorch": vit_pytorch,
    "vit-pytorch, keys with values": keys_with_values,
    "BEiT": beit,
    "peft": of_lora,
}


class TestQueriesAndKeysOfFrameworks:
    @pytest.mark.parametrize("name", FRAMEWORKS)
    def test_are_what_the_attention_call_depends_on(self, name, monkeypatch):
        attention = FRAMEWORKS[name]()
        assert_told(attention, lambda model: model(torch.randn(2, 5, 32)), attention, monkeypatch)


class TestQueriesAndKeysThatCannotBeTold:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (
                lambda a: (
                    delattr(a, "hidden_size_per_attention_head") or delattr(a, "num_attention_heads_per_partition")
                ),
                "cannot tell",
            ),
            (
                lambda a: setattr(a, "hidden_size_per_attention_head", 7),
                "cannot tell queries and keys from values in linear_qkv",
            ),
            (
                lambda a: a.add_module("linear_qkv", nn.Identity()),
                "found no projection of queries and keys in Attention",
            ),
        ],
    )
    def test_are_not_guessed(self, change, reason):
        attention = megatron()
        change(attention)
        assert reason in queries_and_keys(attention)

    def test_are_not_queries_alone(self):
        attention = keys_with_values()
        attention.to_kv = nn.Linear(32, 48)
        assert queries_and_keys(attention) == "cannot tell queries and keys from values in to_kv of Attention"
        attention.to_kv = nn.Identity()
        assert queries_and_keys(attention) == "found no projection of keys in Attention"

    def test_are_not_those_of_an_indexer(self):
        attention = mla(["wq"], "wkv_a", "wkv_b")
        attention.indexer = nn.ModuleDict({"wq_b": nn.Linear(4, 4), "wk": nn.Linear(4, 4)})
        indexer = {id(parameter) for parameter in attention.indexer.parameters()}
        assert not indexer & {id(found.parameter) for found in queries_and_keys(attention)}
