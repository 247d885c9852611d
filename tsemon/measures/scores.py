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


class Rows(NamedTuple):
    """How samples and heads are merged into the rows of a tensor (B * H, ...)."""

    batch: int
    is_heads_first: bool
    """Whether the rows are (H, B) instead of (B, H)."""


class Scores(Protocol):
    """The scores of one call."""

    size: Size
    device: torch.device

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Queries (B, H, T, K) and keys (B, G, S, K) of G heads that the scores are made of. None if not known."""

    is_causal: bool
    """Whether the call itself says that no query sees a later key. A mask may do the same; that is not known here."""

    are_heads_known: bool
    """True if the order of samples and heads is known. If it is not, each row counts as a sample with one head."""

    documents_BT: Tensor | None
    """Document number of each query if the call has it, -1 for queries outside of documents; otherwise None."""

    def of(self, samples: slice) -> Scores:
        """Scores of some of the samples, made ready to be read in several chunks."""

    def at(self, rows: Tensor, num_keys: int | None = None) -> tuple[Tensor, Tensor]:
        """Return scores (B, H, R, S) in float32 or wider, and which keys each query may see, which broadcasts to it.

        `num_keys`: leave out all keys from this one on, which a causal query does not see.
        """

    def sees(self, keys_BT: Tensor) -> Tensor | None:
        """Whether the query in each place may see this one key, in any head (B, T). None where no mask is."""


class DotProducts:
    """Scores of `scaled_dot_product_attention`, whose dropout is no part of attention's measures.

    Fewer key heads than query heads (grouped queries) are matched by their shapes: not all callers pass `enable_gqa`.
    """

    documents_BT: Tensor | None = None

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        merged: Rows | None = None,
    ) -> None:
        if query.ndim > 4:
            leading = query.shape[:-2]
            key = key if key.shape[:2] == leading[:2] and key.shape[2:-2].numel() == 1 else _expanded(key, leading)
            attn_mask = None if attn_mask is None else with_heads(_expanded(attn_mask, leading), None)
        self._query_BHTK, self._key_BGSK = with_heads(query.detach(), merged), with_heads(key.detach(), merged)
        self.are_heads_known = query.ndim > 3 or merged is not None
        self._mask_BHTS = None if attn_mask is None else attn_mask.detach()
        if query.ndim == 3 and attn_mask is not None and attn_mask.ndim == 3:
            expanded = attn_mask.detach().expand(query.shape[0], -1, -1)
            self._mask_BHTS = with_heads(expanded, merged)
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

    def at(self, rows: Tensor, num_keys: int | None = None) -> tuple[Tensor, Tensor]:
        batch, num_heads, *_ = self.size
        keys = _first_keys(self, num_keys)
        query_BHRK = widened(self._query_BHTK.index_select(2, rows)) * self._scale
        query_BGRK = query_BHRK.reshape(batch, self._key_BGSK.shape[1], -1, query_BHRK.shape[-1])
        key_BGSK = widened(self._key_BGSK[:, :, : len(keys)])
        scores_BHRS = (query_BGRK @ key_BGSK.mT).view(batch, num_heads, -1, len(keys))
        visible = (keys <= rows[:, None]) if self.is_causal else (keys >= 0)
        visible = visible.reshape(1, 1, -1, len(keys))
        if (mask := self._mask_BHTS) is not None:
            mask = (mask.index_select(2, rows) if mask.shape[2] > 1 else mask)[..., :num_keys]
            if mask.dtype == torch.bool:
                visible = visible & mask
            else:
                scores_BHRS = scores_BHRS + widened(mask)
                visible = visible & is_visible(scores_BHRS)
        return scores_BHRS, visible

    def sees(self, keys_BT: Tensor) -> Tensor | None:
        if self._mask_BHTS is None:
            return None
        mask_BHTS = self._mask_BHTS.expand(self.size.batch, -1, self.size.queries, self.size.keys)
        of_keys_BHT = _at_keys(mask_BHTS, keys_BT)
        sees_BHT = of_keys_BHT if of_keys_BHT.dtype == torch.bool else of_keys_BHT > -MASKED
        return sees_BHT.any(dim=1)


def _expanded(x: Tensor, leading: torch.Size) -> Tensor:
    """With these leading axes, unless heads share all of it."""
    x = x.detach().reshape((1,) * (len(leading) + 2 - x.ndim) + tuple(x.shape))
    return x if x.shape[1:-2].numel() == 1 else x.expand(*leading, *x.shape[-2:])


class Modified:
    """Dot products that functions of (score, b, h, q, k) and (b, h, q, k) change and mask, as in FlexAttention."""

    def __init__(
        self,
        scores: DotProducts,
        score_mod: Callable[..., Tensor] | None = None,
        mask_mod: Callable[..., Tensor] | None = None,
        first_sample: int = 0,
        documents_BT: Tensor | None = None,
    ) -> None:
        self._scores, self._score_mod, self._mask_mod = scores, score_mod, mask_mod
        self.documents_BT = documents_BT
        self._first_sample = first_sample
        self.size, self.device, self.is_causal = scores.size, scores.device, scores.is_causal
        self.are_heads_known = scores.are_heads_known

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self._scores.factors

    def of(self, samples: slice) -> Modified:
        first_sample = self._first_sample + samples.start
        return Modified(self._scores.of(samples), self._score_mod, self._mask_mod, first_sample)

    def at(self, rows: Tensor, num_keys: int | None = None) -> tuple[Tensor, Tensor]:
        scores_BHRS, visible_BHRS = self._scores.at(rows, num_keys)
        places = (*self._samples_and_heads(), rows, _first_keys(self, num_keys))
        if self._score_mod is not None:
            scores_BHRS = _over_places(self._score_mod, 4, with_score=True)(scores_BHRS, *places)
        if self._mask_mod is not None:
            visible_BHRS = visible_BHRS & _over_places(self._mask_mod, 4)(*places)
        return scores_BHRS, visible_BHRS

    def sees(self, keys_BT: Tensor) -> Tensor | None:
        if self._mask_mod is None:
            return self._scores.sees(keys_BT)
        of_row = torch.vmap(self._mask_mod, in_dims=(None, None, 0, 0))
        of_head = torch.vmap(of_row, in_dims=(None, 0, None, None))
        of_sample = torch.vmap(of_head, in_dims=(0, None, None, 0))
        samples_B, heads_H = self._samples_and_heads()
        queries_T = torch.arange(self.size.queries, device=self.device)
        sees_BT: Tensor = of_sample(samples_B, heads_H, queries_T, keys_BT).any(dim=1)
        return sees_BT & (keys_BT <= queries_T) if self.is_causal else sees_BT

    def _samples_and_heads(self) -> tuple[Tensor, Tensor]:
        samples_B = torch.arange(self.size.batch, device=self.device) + self._first_sample
        return samples_B, torch.arange(self.size.heads, device=self.device)


def _first_keys(scores: Scores, num_keys: int | None) -> Tensor:
    return torch.arange(scores.size.keys if num_keys is None else num_keys, device=scores.device)


def _over_places(mod: Callable[..., Tensor], num_places: int, *, with_score: bool = False) -> Callable[..., Tensor]:
    """`mod` takes single places, as FlexAttention calls it; this takes all of several axes at a time."""
    for axis in reversed(range(num_places)):
        in_dims = [0 if place == axis else None for place in range(num_places)]
        mod = torch.vmap(mod, in_dims=(*([0] if with_score else []), *in_dims))
    return mod


class Materialised:
    """Scores that the model has computed itself, masked by very negative numbers: (B, H, T, S), (B, G, H / G, T, S) with
    heads in groups, or (B * H, T, S)."""

    factors = None
    is_causal = False
    documents_BT: Tensor | None = None

    def __init__(self, scores: Tensor, merged: Rows | None = None) -> None:
        self._scores_BHTS = with_heads(scores.detach(), merged)
        self.are_heads_known = scores.ndim > 3 or merged is not None
        self.size = Size(*self._scores_BHTS.shape[-4:])
        self.device = scores.device

    def of(self, samples: slice) -> Materialised:
        return Materialised(self._scores_BHTS[samples])

    def at(self, rows: Tensor, num_keys: int | None = None) -> tuple[Tensor, Tensor]:
        scores_BHRS = widened(self._scores_BHTS[..., :num_keys].index_select(2, rows))
        return scores_BHRS, is_visible(scores_BHRS)

    def sees(self, keys_BT: Tensor) -> Tensor | None:
        own_BHT = _at_keys(self._scores_BHTS, keys_BT)
        highest = own_BHT.amax()
        lowest = torch.where(highest > MASKED, -FAR * highest, -MASKED)
        return ((own_BHT > lowest) | own_BHT.isnan()).any(dim=1)  # a score that is NaN hides nothing


def _at_keys(x_BHTS: Tensor, keys_BT: Tensor) -> Tensor:
    """One entry of each row."""
    index_BHT1 = keys_BT[:, None, :, None].expand(-1, x_BHTS.shape[1], -1, -1)
    return x_BHTS.gather(-1, index_BHT1)[..., 0]


MASKED = 9e3
"""Masks are -inf, the dtype's lowest number, -1e9 or -1e4: so far below the highest score of the query."""
FAR = 1e3
"""If the highest score is larger than that, as in a saturated network, a mask is this many times as low."""


def is_visible(scores: Tensor) -> Tensor:
    """Which keys are not masked by a very negative score."""
    highest = scores.amax(dim=-1, keepdim=True)
    # The highest one is visible, even if it is so large that the difference is rounded off.
    return (scores >= highest - MASKED) & (highest > torch.finfo(torch.float16).min)


def with_heads(x: Tensor, merged: Rows | None) -> Tensor:
    """(B * H, ...) as (B, H, ...), or (B * H, 1, ...) if it is not known how, and (B, G, H / G, ...) as (B, H, ...).

    A tensor with four axes stays as it is.
    """
    if x.ndim > 3:
        return x.flatten(1, -3) if x.ndim > 4 else x
    if merged is None:
        return x.unsqueeze(1)
    if merged.is_heads_first:
        return x.view(-1, merged.batch, *x.shape[1:]).transpose(0, 1)
    return x.view(merged.batch, -1, *x.shape[1:])
