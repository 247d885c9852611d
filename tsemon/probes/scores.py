"""What goes into the softmax of one attention call, at any of its query rows and never at all of them at once.

Axes: B samples, H heads, T queries, R of them, S keys, K width of a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tsemon.measures.linear import widened


class Size(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int


class Scores(Protocol):
    """The scores of one call."""

    size: Size
    device: torch.device
    is_causal: bool
    """Whether the call itself says that no query sees a later key. A mask may do the same; that is not known here."""

    def of(self, samples: slice) -> Scores:
        """Those of some of the samples, made ready to be read in several chunks."""

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, H, R, S) in float32 or wider, and what may be broadcast to that: which keys each query may see."""

    def sees_itself(self) -> Tensor | None:
        """Which tokens (B, min(T, S)) a query in their place may see, in any head: not padding. None where no mask is."""


class DotProducts:
    """Scores of `scaled_dot_product_attention`, whose dropout is no part of attention's measures.

    Fewer key heads than query heads (grouped queries) are matched up by their shapes: callers differ in whether they say so.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> None:
        self._query_BHTK, self._key_BGSK = query.detach(), key.detach()
        self._mask_BHTS = None if attn_mask is None else attn_mask.detach()
        if query.ndim == 3:
            self._query_BHTK, self._key_BGSK = self._query_BHTK.unsqueeze(1), self._key_BGSK.unsqueeze(1)
            if attn_mask is not None and attn_mask.ndim == 3:
                self._mask_BHTS = attn_mask.detach().unsqueeze(1)
        if (mask := self._mask_BHTS) is not None:
            self._mask_BHTS = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        batch, heads, queries, _ = self._query_BHTK.shape
        self.size = Size(batch, heads, queries, self._key_BGSK.shape[2])
        self.device = query.device
        self.is_causal = is_causal
        self._scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale

    def of(self, samples: slice) -> DotProducts:
        mask = self._mask_BHTS
        mask = mask[samples] if mask is not None and mask.shape[0] > 1 else mask
        query_BHTK, key_BGSK = self._query_BHTK[samples], widened(self._key_BGSK[samples])
        return DotProducts(query_BHTK, key_BGSK, mask, self.is_causal, self._scale)

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        batch, num_heads, _, num_keys = self.size
        query_BHRK = widened(self._query_BHTK.index_select(2, rows)) * self._scale
        query_BGRK = query_BHRK.reshape(batch, self._key_BGSK.shape[1], -1, query_BHRK.shape[-1])
        scores_BHRS = (query_BGRK @ widened(self._key_BGSK).mT).view(batch, num_heads, -1, num_keys)
        keys = torch.arange(num_keys, device=self.device)
        visible = (keys <= rows[:, None]) if self.is_causal else (keys >= 0)
        visible = visible.reshape(1, 1, -1, num_keys)
        if (mask := self._mask_BHTS) is not None:
            mask = mask.index_select(2, rows) if mask.shape[2] > 1 else mask
            if mask.dtype == torch.bool:
                visible = visible & mask
            else:
                scores_BHRS = scores_BHRS + widened(mask)
                visible = visible & is_visible(scores_BHRS)
        return scores_BHRS, visible

    def sees_itself(self) -> Tensor | None:
        if self._mask_BHTS is None:
            return None
        mask_BHTS = self._mask_BHTS.expand(-1, -1, self.size.queries, self.size.keys)
        diagonal_BHT = mask_BHTS.diagonal(dim1=-2, dim2=-1)
        sees_BHT = diagonal_BHT if diagonal_BHT.dtype == torch.bool else diagonal_BHT > -MASKED
        return sees_BHT.any(dim=1).expand(self.size.batch, -1)


class Materialised:
    """Scores that the model has computed itself, (B, H, T, S) or (B * H, T, S), masked by very negative numbers."""

    is_causal = False

    def __init__(self, scores: Tensor, num_heads: int | None = None) -> None:
        self._scores_BHTS = with_heads(scores.detach(), num_heads)
        self.size = Size(*self._scores_BHTS.shape[-4:])
        self.device = scores.device

    def of(self, samples: slice) -> Materialised:
        return Materialised(self._scores_BHTS[samples])

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scores_BHRS = widened(self._scores_BHTS.index_select(2, rows))
        return scores_BHRS, is_visible(scores_BHRS)

    def sees_itself(self) -> Tensor | None:
        return (self._scores_BHTS.diagonal(dim1=-2, dim2=-1) > -MASKED).any(dim=1)


MASKED = 9e3
"""Masks are -inf, the dtype's lowest number, -1e9 or -1e4: so far below what the query scores highest."""


def is_visible(scores: Tensor) -> Tensor:
    """Which keys are not masked by a very negative score."""
    highest = scores.amax(dim=-1, keepdim=True)
    return (scores > highest - MASKED) & (highest > torch.finfo(torch.float16).min)


def with_heads(x: Tensor, num_heads: int | None) -> Tensor:
    """(B * H, ...) as (B, H, ...); what has four axes is that already."""
    if x.ndim > 3:
        return x
    num_heads = num_heads if num_heads and x.shape[0] % num_heads == 0 else 1
    return x.view(-1, num_heads, *x.shape[1:])
