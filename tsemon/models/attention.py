"""Self-attention, fused or written out.

Axes: `B` batch, `T` tokens, `S` tokens that are attended to, `D` width, `H` heads, `K` width of a head.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models.cache import Cache

AttentionPath = Literal["sdpa", "materialised"]
Masking = Literal["exclude", "multiply"]
"""`exclude`: a query does not see later tokens. `multiply`: their scores are multiplied by 0, so that it still sees them."""


def attend(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    *,
    causal: bool,
    visible_TS: Tensor | None = None,
    path: AttentionPath = "sdpa",
    scale: float | None = None,
    bias_BHTS: Tensor | None = None,
    masking: Masking = "exclude",
) -> Tensor:
    """softmax(scale Q K' + bias) V for each head: (B, H, T, K), with the width of the values.

    Where `causal` the queries are those of the last T of the S tokens, and each sees the tokens up to its own; otherwise
    those that `visible_TS` (bool) names, or those to which `bias_BHTS` adds more than -inf, or all. Keys and values may
    have fewer heads than the queries; neighbouring queries then share one (grouped queries). `scale` is 1 / sqrt(K) by
    default. The materialised path writes the T x S weights out, for checks; both give the same. `masking="multiply"` gives
    later tokens of a causal model the score 0, as the code of Parameter Norm Growth's authors does: no fused kernel does.
    Raises ShapeError where `causal` and T is more than S: a token sees at least itself; InvalidArgument for
    `masking="multiply"` without `causal` or with a bias.
    """
    num_queries, num_keys = query_BHTK.shape[2], key_BHSK.shape[2]
    if causal and num_queries > num_keys:
        raise ShapeError(f"causal attention needs at least as many keys as queries, got {num_queries} and {num_keys}")
    if masking == "multiply" and (not causal or bias_BHTS is not None):
        raise InvalidArgument("masking='multiply' is for causal attention without a bias; leave masking='exclude'")
    if path == "sdpa" and masking == "exclude":
        options: dict[str, Any] = {} if scale is None else {"scale": scale}
        if query_BHTK.shape[1] != key_BHSK.shape[1]:
            options["enable_gqa"] = True
        if causal and 1 < num_queries < num_keys:
            visible_TS = visible(num_queries, num_keys, query_BHTK.device)
        if visible_TS is not None or bias_BHTS is not None:
            options["attn_mask"] = visible_TS if bias_BHTS is None else bias_BHTS
        # Called by its full name, at call time: whoever watches attention from outside may wrap the function.
        return torch.nn.functional.scaled_dot_product_attention(
            query_BHTK, key_BHSK, value_BHSK, is_causal=causal and num_queries == num_keys, **options
        )
    groups = query_BHTK.shape[1] // key_BHSK.shape[1]
    key_BHSK, value_BHSK = key_BHSK.repeat_interleave(groups, 1), value_BHSK.repeat_interleave(groups, 1)
    scale = 1 / math.sqrt(query_BHTK.shape[3]) if scale is None else scale
    scores_BHTS = scale * query_BHTK @ key_BHSK.transpose(2, 3)
    if bias_BHTS is not None:
        scores_BHTS = scores_BHTS + bias_BHTS
    if causal:
        visible_TS = visible(num_queries, num_keys, query_BHTK.device)
    if visible_TS is not None:
        scores_BHTS = scores_BHTS.masked_fill(~visible_TS, -math.inf if masking == "exclude" else 0.0)
    return torch.softmax(scores_BHTS, dim=3) @ value_BHSK


def visible(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """(T, S), bool: which keys the last T of S tokens see, each those up to its own."""
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return everything.tril(num_keys - num_queries)


def check_heads(width: int, heads: int) -> None:
    if heads < 1 or width < 1 or width % heads:
        raise InvalidArgument(
            f"width must be a positive multiple of heads, got width {width} and {heads} heads; "
            "choose a width that the number of heads divides"
        )


class SelfAttention(nn.Module):
    """Multi-head self-attention: P X W of Algorithm 1, with P = softmax(scale Q K') for each head.

    Takes and returns (B, T, D). Where `causal`, token t sees tokens 0 to t, those in the cache among them. `scale` is
    1 / sqrt(D / H) by default; Eq. 2 of Classic Transformers (arXiv 2312.06182) has 1 / sqrt(D). With `masking="multiply"`
    later tokens are seen, too.
    Raises InvalidArgument unless `heads` divides `width`, ShapeError when the input has another width. With a cache that has
    read tokens, `masking="multiply"` raises InvalidArgument.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool = False,
        *,
        scale: float | None = None,
        path: AttentionPath = "sdpa",
        masking: Masking = "exclude",
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        self.heads = heads
        self.causal = causal
        self.scale = scale
        self.path = path
        self.masking = masking
        self.to_query_key_value = nn.Linear(width, 3 * width)
        self.to_output = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        width = self.to_output.in_features
        if x_BTD.ndim != 3 or x_BTD.shape[2] != width:
            raise ShapeError(f"expected (batch, tokens, {width}), got {tuple(x_BTD.shape)}")
        qkv_BTHK = self.to_query_key_value(x_BTD).unflatten(2, (3 * self.heads, -1))
        query, key, value = qkv_BTHK.transpose(1, 2).chunk(3, dim=1)
        if cache is not None:
            if self.masking == "multiply" and cache.num_tokens:
                raise InvalidArgument(
                    "a model with masking='multiply' sees later tokens, so it cannot read or generate token by token; "
                    "read the whole sequence without a cache"
                )
            key, value = cache.append(self, key=key, value=value)
        mixed_BHTK = attend(
            query, key, value, causal=self.causal, path=self.path, scale=self.scale, masking=self.masking
        )
        y_BTD: Tensor = self.to_output(mixed_BHTK.transpose(1, 2).flatten(2))
        return y_BTD
