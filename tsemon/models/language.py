"""A small causal language model.

Axes: `B` batch, `T` tokens, `D` width, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models.blocks import stack_of_blocks


class CausalLanguageModel(nn.Module):
    """Decoder of post-norm blocks with learned positions and an output layer of its own.

    Takes token numbers (B, T) with T up to `context`, returns logits (B, T, V) for the token that follows each.
    `tau=None` is the classic model, a number from 0 to 1 its twin, de-escalated by prefix means.
    Raises InvalidArgument for sizes that do not fit together, ShapeError for a sequence longer than the context.
    """

    def __init__(
        self, vocab: int, context: int, depth: int, width: int, heads: int, ffn: int, tau: float | None = None
    ) -> None:
        super().__init__()
        if vocab < 1 or context < 1:
            raise InvalidArgument(f"vocab and context must be at least 1, got vocab {vocab} and context {context}")
        self.context = context
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = stack_of_blocks(depth, width, heads, ffn, tau, causal=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if tokens_BT.ndim != 2 or tokens_BT.shape[1] > self.context:
            raise ShapeError(
                f"expected (batch, tokens) with at most {self.context} tokens, got {tuple(tokens_BT.shape)}"
            )
        x_BTD = self.embed(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(x_BTD)
        return logits_BTV
