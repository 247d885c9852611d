"""Samples and heads that a model merges into one axis: which of them come first.

Axes: B samples, H heads, T queries, K width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsemon.measures.scores import Rows

RESHAPING = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}
MERGING = RESHAPING | {torch.cat, torch.concat, torch.concatenate, torch.vstack, Tensor.view_as, Tensor.reshape_as}
"""Functions of PyTorch that may merge samples and heads."""


class Merges:
    """The order in one attention module, from the calls inside it.

    num_tokens: tokens of all samples; 0 if not known.
    num_heads: number of heads if the module has it.
    """

    def __init__(self, num_tokens: int = 0, num_heads: int | None = None) -> None:
        self._num_tokens, self._num_heads = num_tokens, num_heads
        self._seen: set[tuple[int, int, bool | None]] = set()
        """Lengths of two axes that were merged, and whether heads are the first. None: either may be."""
        self.are_of_multihead = False
        """True if they are made by PyTorch's own multi-head attention, which merges (B, H)."""

    def see(self, given: Any, result: Any) -> None:
        """A function of MERGING was called."""
        if not isinstance(result, Tensor) or result.is_nested:
            return
        if isinstance(given, list | tuple):
            sizes = {len(x) for x in given if x.ndim == result.ndim == 3}
            if len(sizes) == 1 and len(result) == len(given) * min(sizes):
                self._seen.add((len(given), min(sizes), True))
        elif isinstance(given, Tensor):
            before, after = given.shape, result.shape
            for axis in range(len(before) - 1):
                if after == (*before[:axis], before[axis] * before[axis + 1], *before[axis + 2 :]):
                    self._seen.add((before[axis], before[axis + 1], None))
            is_split = len(before) == len(after) == 3 and before[0] == after[0] and 0 < after[2] < before[2]
            if is_split:  # (T, B, H * K) to (T, B * H, K)
                self._seen.add((before[1], before[2] // after[2], False))

    def of(self, x: Tensor) -> Rows | None:
        """How they are merged in a tensor (B * H, T, ...); None if nothing shows it."""
        if x.ndim != 3 or (batch := self._batch(*x.shape[:2])) is None:
            return None
        heads = len(x) // batch
        if self.are_of_multihead or batch == 1 or heads == 1:
            return Rows(batch, is_heads_first=False)
        found = set[bool | None]()
        for first, second, is_heads_first in self._seen:
            orders = [is_heads_first] if is_heads_first is not None else [False, True]
            if is_heads_first is None and heads == x.shape[1] and {first, second} == {heads, batch}:
                found.add(None)  # it may as well have merged samples and tokens
                continue
            fits = {order for order in orders if (first, second) == ((heads, batch) if order else (batch, heads))}
            found |= fits if len(fits) < 2 else {None}
        known = found - {None} or found
        return Rows(batch, is_heads_first=known == {True}) if known in ({False}, {True}) else None

    def _batch(self, rows: int, tokens: int) -> int | None:
        batch = self._num_tokens // tokens if tokens and self._num_tokens % tokens == 0 else 0
        if (not batch or rows % batch) and self._num_heads:
            batch = rows // self._num_heads
        return batch if batch and rows % batch == 0 else None
