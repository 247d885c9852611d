"""Recognize modules by the words in their attribute and class names.

Names are split into words, so "XLNet" has no "ln". The last word of a class decides: an `AttentionNorm` is a
norm, a `PreLayerNormAttention` is an attention.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from torch import nn

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
ATTENTION_WORDS = frozenset({"att", "mha", "mhsa", "msa", "mqa", "gqa", "mla"})
CROSS_WORDS = frozenset({"cross", "crossattention", "crossattn", "encdec", "xattn"})
CROSS_NAMES = frozenset({"encoder_attn", "encoder_attention", "enc_attn", "src_attn", "memory_attn"})
"""Names of the attention of decoders to an encoder."""
LINEAR_WORDS = frozenset({"linear", "lightning", "delta", "deltanet", "rwkv", "retention", "gla", "fourier", "hyena"})
"""Kinds of attention that have no softmax, hence no attention weights."""
MIXER_WORDS = LINEAR_WORDS - {"linear"} | {
    *("mamba", "mixer", "ssm", "ssd", "recurrent", "rglru", "mlstm", "slstm", "xlstm", "timemix"),
}
FEED_FORWARD_WORD = re.compile(r"\w*(mlp|moe|ffn)|ff|feed|feedforward|experts?")
ACCESSORIES = frozenset({
    *("ln", "norm", "drop", "dropout", "path", "scale", "ls", "bias", "mask", "proj", "gate", "rope", "embedding"),
    *("embeddings", "emb", "pool", "pooling", "out", "output", "weights", "processor"),
})  # fmt: skip
"""Other things that are named after attention: `attn_drop`, `attention_mask`, `post_attention_layernorm`."""


@functools.lru_cache(maxsize=4096)  # large models repeat few names
def words(name: str) -> tuple[str, ...]:
    """Split a snake_case or CamelCase name into lowercase words, without its digits."""
    return tuple(word.lower() for word in WORD.findall(name))


@functools.lru_cache(maxsize=4096)
def names_attention(name: str) -> bool:
    """True if an attribute or a class of this name is an attention, self-attention or not."""
    found = words(name)
    return any(map(_is_attention_word, found)) and not _is_accessory(found[-1])


def names_self_attention(name: str) -> bool:
    """True if an attribute or a class of this name is a self-attention with a softmax."""
    return names_attention(name) and not _names_cross(name) and not LINEAR_WORDS & {*words(name)}


def names_feed_forward(name: str) -> bool:
    """True if an attribute or a class of this name is a feed-forward part, or one of its experts."""
    return any(map(FEED_FORWARD_WORD.fullmatch, words(name)))


def is_self_attention(name: str, module: nn.Module) -> bool:
    """True if the module with this attribute name is a self-attention with a softmax."""
    if not is_called(module) or _is_leaf(module):
        return False
    kind = type(module).__name__
    if _names_cross(name) or _names_cross(kind) or LINEAR_WORDS & {*words(name), *words(kind)}:
        return False
    return names_attention(kind) or (names_attention(name) and not MIXER_WORDS & {*words(kind)})


def is_mixer(name: str, module: nn.Module) -> bool:
    """True if the module mixes tokens: any attention, a state-space model, a recurrence, a Fourier transform."""
    if not is_called(module) or _is_leaf(module):
        return False
    kind = type(module).__name__
    if names_feed_forward(kind):
        return False
    return names_attention(name) or names_attention(kind) or bool(MIXER_WORDS & {*words(name), *words(kind)})


def is_norm(module: nn.Module) -> bool:
    """True if the module normalizes, and does nothing more: a `PreNorm` around a layer is no norm."""
    found = words(type(module).__name__)
    return bool(found) and (found[-1].endswith("norm") or found[-1] == "ln") and not any(module.children())


def is_called(module: nn.Module) -> bool:
    """True if the module has a forward. A ModuleList and a ModuleDict have none: their parts are called one by one."""
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def named_inside(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Dotted path, last part of it and the module itself, for all that is inside of `module`."""
    for path, inner in module.named_modules():
        if path:
            yield path, path.rpartition(".")[2], inner


def _is_attention_word(word: str) -> bool:
    return word in ATTENTION_WORDS or word.endswith(("attn", "attns", "attention", "attentions"))


def _is_accessory(word: str) -> bool:
    return word in ACCESSORIES or word.endswith("norm")


def _names_cross(name: str) -> bool:
    found = words(name)
    return bool(CROSS_WORDS & {*found}) or name in CROSS_NAMES or found[:2] == ("enc", "dec")


def _is_leaf(module: nn.Module) -> bool:
    """True for a linear layer and the like, which `c_attn` and `attn_drop` may be."""
    kind = words(type(module).__name__)
    if isinstance(module, nn.Linear | nn.Identity | nn.Embedding) or (kind and kind[-1] == "linear"):
        return True
    return bool(kind) and (_is_accessory(kind[-1]) or kind == ("conv", "d"))
