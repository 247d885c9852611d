"""The encoder of T5 (arXiv 1910.10683), whose checkpoints Effects of Parameter Norm Growth (arXiv 2010.09697) studies.

Axes: `B` batch, `T` tokens, `D` width, `H` heads, `K` width of a head, `F` hidden width of the feed-forward network, `V`
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import presets
from tsemon.models.presets import OfPreset, Presets, Sizes

NUM_BUCKETS, MAX_DISTANCE = 32, 128


@dataclass(frozen=True, kw_only=True)
class T5EncoderConfig(Presets):
    """Sizes of a T5Encoder. Raises InvalidArgument for a size below 1."""

    PRESETS: ClassVar[Mapping[str, Sizes]] = presets.T5_ENCODER
    vocab: int = 32_128
    context: int = 512
    depth: int
    width: int
    heads: int
    head_width: int = 64
    ffn: int

    def __post_init__(self) -> None:
        for name in ("vocab", "context", "depth", "width", "heads", "head_width", "ffn"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {getattr(self, name)}")


class T5Encoder(OfPreset, nn.Module):
    """The encoder of T5 with a head that shares the token embedding, to fill in masks.

    Takes tokens (B, T) with T up to `context`, returns logits (B, T, V). Nothing has a bias, norms do not subtract the mean,
    scores are not scaled, and positions are a bias of the scores that all blocks share. Weights start as in the authors'
    code. There is no dropout, and no padding is masked.
    Raises InvalidArgument for a size below 1, ShapeError for a sequence longer than the context.
    """

    CONFIG = T5EncoderConfig

    def __init__(self, config: T5EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(NUM_BUCKETS, config.heads)
        nn.init.normal_(self.positions.weight, std=config.width**-0.5)
        self.blocks = nn.ModuleList(T5Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if tokens_BT.ndim != 2 or not 1 <= tokens_BT.shape[1] <= self.config.context:
            expected = f"(batch, tokens) with 1 to {self.config.context} tokens"
            raise ShapeError(f"expected {expected}, got {tuple(tokens_BT.shape)}")
        x_BTD = self.embed(tokens_BT)
        bias_HTT = self.positions(buckets(tokens_BT.shape[1], tokens_BT.device)).permute(2, 0, 1)
        for block in self.blocks:
            x_BTD = block(x_BTD, bias_HTT)
        return F.linear(self.norm(x_BTD) * self.config.width**-0.5, self.embed.weight)


class T5Block(nn.Module):
    """x + SA(norm(x)), then x + FF(norm(x)): takes and returns (B, T, D)."""

    def __init__(self, config: T5EncoderConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(config.width, eps=1e-6) for _ in range(2))
        self.attention, self.feed_forward = T5Attention(config), T5FeedForward(config)

    def forward(self, x_BTD: Tensor, bias_HTT: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), bias_HTT)
        y_BTD: Tensor = x_BTD + self.feed_forward(self.norm2(x_BTD))
        return y_BTD


class T5Attention(nn.Module):
    """softmax(Q K' + bias) V for each head, without a scale. Takes and returns (B, T, D)."""

    def __init__(self, config: T5EncoderConfig) -> None:
        super().__init__()
        self.heads, inner = config.heads, config.heads * config.head_width
        self.to_query = linear(config.width, inner, std=(config.width * config.head_width) ** -0.5)
        self.to_key, self.to_value = (linear(config.width, inner, std=config.width**-0.5) for _ in range(2))
        self.to_output = linear(inner, config.width, std=inner**-0.5)

    def forward(self, x_BTD: Tensor, bias_HTT: Tensor) -> Tensor:
        query, key, value = (
            to(x_BTD).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for to in (self.to_query, self.to_key, self.to_value)
        )
        mask_HTT = bias_HTT.to(query.dtype)[None]
        mixed_BHTK = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_HTT, scale=1.0)
        y_BTD: Tensor = self.to_output(mixed_BHTK.transpose(1, 2).flatten(2))
        return y_BTD


class T5FeedForward(nn.Module):
    """W_2 relu(W_1 x). Takes and returns (B, T, D)."""

    def __init__(self, config: T5EncoderConfig) -> None:
        super().__init__()
        self.expand = linear(config.width, config.ffn, std=config.width**-0.5)
        self.contract = linear(config.ffn, config.width, std=config.ffn**-0.5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.contract(F.relu(self.expand(x_BTD)))
        return y_BTD


def linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


def buckets(num_tokens: int, device: torch.device) -> Tensor:
    """Which position embedding query i uses for key j, (T, T), by their distance j - i.

    16 buckets for keys before the query, and as many for later ones: one for each distance below 8, then 8 whose sizes grow
    logarithmically up to distance 128, beyond which all keys share the last one (Section 2.1).
    """
    place_T = torch.arange(num_tokens, device=device)
    distance_TT = place_T[None, :] - place_T[:, None]
    half, exact = NUM_BUCKETS // 2, NUM_BUCKETS // 4
    far_TT = distance_TT.abs().clamp(min=1).float() / exact
    far_TT = exact + (far_TT.log() / math.log(MAX_DISTANCE / exact) * (half - exact)).long()
    near_TT = distance_TT.abs()
    return half * (distance_TT > 0) + torch.where(near_TT < exact, near_TT, far_TT.clamp(max=half - 1))
