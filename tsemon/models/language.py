"""A causal language model of plain blocks.

Axes: `B` batch, `T` tokens, `D` width, `V` vocabulary.
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
from tsemon.models.cache import Cache, positions
from tsemon.models.presets import OfPreset, Presets, Sizes


@dataclass(frozen=True, kw_only=True)
class CausalLanguageModelConfig(BlockConfig, Presets):
    PRESETS: ClassVar[Mapping[str, Sizes]] = presets.LANGUAGE
    vocab: int
    context: int
    depth: int
    causal: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab < 1 or self.context < 1:
            raise InvalidArgument(
                f"vocab and context must be at least 1, got vocab {self.vocab} and context {self.context}"
            )
        if not self.causal:
            raise InvalidArgument("a CausalLanguageModel is causal; a TextEncoder sees the whole sequence")


class CausalLanguageModel(OfPreset, nn.Module):
    """Decoder with learned positions and an output layer of its own.

    Takes token numbers (B, T), returns logits (B, T, V) for the token that follows each. With a cache, T counts the tokens
    that it has read too; all in all they are up to `context`. With a `tau` it is de-escalated by prefix means.
    Raises InvalidArgument for sizes that do not fit together, ShapeError for a sequence longer than the context.
    """

    CONFIG = CausalLanguageModelConfig

    def __init__(self, config: CausalLanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = stack(config, config.depth)
        self.norm = last_norm(config)
        self.head = nn.Linear(config.width, config.vocab)

    def forward(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        start, end = positions(tokens_BT, cache, self.config.context)
        x_BTD = self.embed(tokens_BT) + self.positions(torch.arange(start, end, device=tokens_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD, cache)
        if cache is not None:
            cache.num_tokens = end
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV
