"""Text from a decoder, token by token.

Axes: `B` batch, `T` tokens, `V` vocabulary, `K` the likeliest of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument
from tsemon.models.cache import Cache


@torch.no_grad()
def generate(
    model: Callable[..., Tensor],
    tokens_BT: Tensor,
    num_new: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The tokens with `num_new` more, (B, T + num_new), each drawn after all before it.

    model: a decoder with logits = model(tokens, cache=cache): `CausalLanguageModel`, `Llama`, or the method `read` of a
        `TransformerXL`.
    temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is drawn.
    top_k: draw among the k likeliest only.
    Raises InvalidArgument for settings out of range, and what the model raises past its context.
    """
    if num_new < 0 or not temperature >= 0 or (top_k is not None and top_k < 1) or tokens_BT.numel() < 1:
        raise InvalidArgument(
            "generate needs at least one token to go on from, num_new >= 0, temperature >= 0 and top_k >= 1, got "
            f"{tuple(tokens_BT.shape)} tokens, num_new {num_new}, temperature {temperature} and top_k {top_k}"
        )
    context = getattr(getattr(model, "config", None), "context", None)
    if context is not None and tokens_BT.shape[1] + num_new > context + 1:
        raise InvalidArgument(
            f"{tokens_BT.shape[1]} tokens and num_new {num_new} are more than the model's context of {context} and one"
        )
    cache = Cache()
    unread_BT = tokens_BT
    for _ in range(num_new):
        logits_BV = model(unread_BT, cache=cache)[:, -1]
        unread_BT = _choose(logits_BV, temperature, top_k, generator)
        tokens_BT = torch.cat([tokens_BT, unread_BT], dim=1)
    return tokens_BT


def _choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(dim=1, keepdim=True)
    num_likely = logits_BV.shape[1] if top_k is None else min(top_k, logits_BV.shape[1])
    logits_BK, tokens_BK = logits_BV.float().topk(num_likely, dim=1)  # exactly so many, where some are equal too
    weights_BK = torch.softmax((logits_BK - logits_BK[:, :1]) / temperature, dim=1)
    return tokens_BK.gather(1, torch.multinomial(weights_BK, 1, generator=generator))
