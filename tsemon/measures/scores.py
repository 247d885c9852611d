"""The input of the softmax of one attention call, for some of its query rows at a time.

Axes: B samples, H heads, T queries, R of them, S keys, K width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Queries (B, H, T, K) and keys (B, G, S, K) of G heads that the scores are made of. None if not known."""

    is_causal: bool
    """Whether the call itself says that no query sees a later key. A mask may do the same; that is not known here."""

    def of(self, samples: slice) -> Scores:
        """Scores of some of the samples, made ready to be read in several chunks."""

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, H, R, S) in float32 or wider, and what may be broadcast to that: which keys each query may see."""

    def sees_itself(self) -> Tensor | None:
        """Which tokens (B, min(T, S)) a query in their place may see, in any head: not padding. None where no mask is."""


class DotProducts:
    """Scores of `scaled_dot_product_attention`, whose dropout is no part of attention's measures.

    Fewer key heads than query heads (grouped queries) are matched by their shapes: not all callers pass `enable_gqa`.
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

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self._query_BHTK, self._key_BGSK

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


class Modified:
    """Dot products that functions of (score, b, h, q, k) and (b, h, q, k) change and mask, as in FlexAttention."""

    def __init__(
        self,
        scores: DotProducts,
        score_mod: Callable[..., Tensor] | None = None,
        mask_mod: Callable[..., Tensor] | None = None,
        first_sample: int = 0,
    ) -> None:
        self._scores, self._score_mod, self._mask_mod = scores, score_mod, mask_mod
        self._first_sample = first_sample
        self.size, self.device, self.is_causal = scores.size, scores.device, scores.is_causal

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self._scores.factors

    def of(self, samples: slice) -> Modified:
        first_sample = self._first_sample + samples.start
        return Modified(self._scores.of(samples), self._score_mod, self._mask_mod, first_sample)

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scores_BHRS, visible_BHRS = self._scores.at(rows)
        places = (*self._samples_and_heads(), rows, torch.arange(self.size.keys, device=self.device))
        if self._score_mod is not None:
            scores_BHRS = _over_places(self._score_mod, 4, with_score=True)(scores_BHRS, *places)
        if self._mask_mod is not None:
            visible_BHRS = visible_BHRS & _over_places(self._mask_mod, 4)(*places)
        return scores_BHRS, visible_BHRS

    def sees_itself(self) -> Tensor | None:
        if (mask_mod := self._mask_mod) is None:
            return self._scores.sees_itself()
        tokens_T = torch.arange(min(self.size.queries, self.size.keys), device=self.device)
        sees_BHT = _over_places(lambda b, h, i: mask_mod(b, h, i, i), 3)(*self._samples_and_heads(), tokens_T)
        return sees_BHT.any(dim=1)

    def _samples_and_heads(self) -> tuple[Tensor, Tensor]:
        samples_B = torch.arange(self.size.batch, device=self.device) + self._first_sample
        return samples_B, torch.arange(self.size.heads, device=self.device)


def _over_places(mod: Callable[..., Tensor], num_places: int, *, with_score: bool = False) -> Callable[..., Tensor]:
    """`mod` takes single places, as FlexAttention calls it; this takes all of several axes at a time."""
    for axis in reversed(range(num_places)):
        in_dims = [0 if place == axis else None for place in range(num_places)]
        mod = torch.vmap(mod, in_dims=(*([0] if with_score else []), *in_dims))
    return mod


class Materialised:
    """Scores that the model has computed itself, (B, H, T, S) or (B * H, T, S), masked by very negative numbers."""

    factors = None
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
"""Masks are -inf, the dtype's lowest number, -1e9 or -1e4: so far below the highest score of the query."""


def is_visible(scores: Tensor) -> Tensor:
    """Which keys are not masked by a very negative score."""
    highest = scores.amax(dim=-1, keepdim=True)
    return (scores > highest - MASKED) & (highest > torch.finfo(torch.float16).min)


def with_heads(x: Tensor, num_heads: int | None) -> Tensor:
    """(B * H, ...) as (B, H, ...); a tensor with four axes is returned as it came."""
    if x.ndim > 3:
        return x
    num_heads = num_heads if num_heads and x.shape[0] % num_heads == 0 else 1
    return x.view(-1, num_heads, *x.shape[1:])
