"""Encoders: the bare stack of blocks, and BERT and ALBERT around it.

Axes: `B` batch, `T` tokens, `D` width, `E` width of the embeddings, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument
from tsemon.models import presets
from tsemon.models.blocks import BlockConfig, last_norm, stack
from tsemon.models.cache import positions
from tsemon.models.presets import OfPreset, Presets, Sizes


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(BlockConfig, Presets):
    PRESETS: ClassVar[Mapping[str, Sizes]] = presets.ENCODER
    depth: int
    num_weights: int | None = None
    """How many blocks have weights of their own; None: all. ALBERT has 1."""


class Encoder(OfPreset, nn.Module):
    """A stack of blocks and nothing else: takes and returns hidden states (B, T, D)."""

    CONFIG = EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = stack(config, config.depth, config.num_weights)
        self.norm = last_norm(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BTD = block(x_BTD)
        y_BTD: Tensor = self.norm(x_BTD)
        return y_BTD


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(BlockConfig, Presets):
    PRESETS: ClassVar[Mapping[str, Sizes]] = presets.TEXT_ENCODER
    vocab: int
    context: int
    depth: int
    embedding: int | None = None
    """E; None: D. ALBERT's is smaller, and a linear layer widens it."""
    num_weights: int | None = None
    """How many blocks have weights of their own; None: all. ALBERT has 1."""
    num_types: int = 2
    """Kinds of segments, which BERT tells apart."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab < 1 or self.context < 1 or self.num_types < 1:
            raise InvalidArgument(
                "vocab, context and num_types must be at least 1, "
                f"got vocab {self.vocab}, context {self.context} and num_types {self.num_types}"
            )


class TextEncoder(OfPreset, nn.Module):
    """BERT (arXiv 1810.04805), or with few `num_weights` and a narrow `embedding` ALBERT (1909.11942), to fill in masks.

    Takes tokens (B, T) with T up to `context`, and the segment of each, 0 by default. Returns logits (B, T, V). The head
    shares the token embedding. Weights are normal with `init_std`, biases zero. Sequences are full: no padding is masked,
    and there is no dropout. Norms add PyTorch's 1e-5 to the variance, where BERT has 1e-12; ALBERT's GELU is exact here.
    Raises InvalidArgument for sizes that do not fit together, ShapeError for a sequence longer than the context.
    """

    CONFIG = TextEncoderConfig

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.config = config
        embedding = config.width if config.embedding is None else config.embedding
        self.embed = nn.Embedding(config.vocab, embedding)
        self.positions = nn.Embedding(config.context, embedding)
        self.types = nn.Embedding(config.num_types, embedding)
        self.norm = nn.LayerNorm(embedding)
        self.widen = nn.Identity() if config.embedding is None else nn.Linear(embedding, config.width)
        self.blocks = stack(config, config.depth, config.num_weights)
        self.last_norm = last_norm(config)
        self.to_embedding = nn.Linear(config.width, embedding)
        self.embedding_norm = nn.LayerNorm(embedding)
        self.bias = nn.Parameter(torch.zeros(config.vocab))
        self.apply(self._start)

    def forward(self, tokens_BT: Tensor, types_BT: Tensor | None = None) -> Tensor:
        positions_T = torch.arange(*positions(tokens_BT, None, self.config.context), device=tokens_BT.device)
        types_BT = torch.zeros_like(tokens_BT) if types_BT is None else types_BT
        x_BTE = self.norm(self.embed(tokens_BT) + self.positions(positions_T) + self.types(types_BT))
        x_BTD = self.widen(x_BTE)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        y_BTE = self.to_embedding(self.last_norm(x_BTD))
        y_BTE = self.embedding_norm(torch.nn.functional.gelu(y_BTE))
        return torch.nn.functional.linear(y_BTE, self.embed.weight, self.bias)

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.init_std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
