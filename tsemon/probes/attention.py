"""Listen to attention without a T x T matrix: take queries and keys where they meet, and weigh a few query rows.

Models compute attention in three ways: `scaled_dot_product_attention` called by the module, the same called by
`nn.MultiheadAttention` from inside `torch.nn.functional`, and a softmax over materialised scores. A torch function mode,
active only while one attention module runs, sees the first and the third; inside a mode's handler no mode is active, so
for the second the names in `torch.nn.functional` are replaced while that one call lasts.

Axes: B samples, H heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tsemon.measures import normalized_row_entropy
from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks

MAX_ROWS = 64
"""Query rows weighed per head, evenly spread: with 64 of 1,024 the mean entropy (4.07 nats) has a standard error of 0.03."""
TARGET_WEIGHTS = 2**18
"""Attention weights computed per layer, as long as this leaves a sequence and `MIN_ROWS`: caps time and memory."""
MIN_ROWS = 8

SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax}


class AttentionProbe:
    """Row entropy per head of every block's self-attention at one sampled step."""

    METRICS = ("attention_entropy", "attention_entropy_min")

    def __init__(self, blocks: list[Block]) -> None:
        self._attentions = [block.attention for block in blocks]
        self._entropy_H: dict[int, Tensor] = {}
        self._open: dict[int, AttentionTap] = {}
        self._hooks: Hooks | None = None

    def arm(self, hooks: Hooks) -> None:
        self._entropy_H, self._open, self._hooks = {}, {}, hooks
        for layer, module in enumerate(self._attentions):
            if module is not None:
                hooks.before(module, lambda module, args, kwargs, layer=layer: self._enter(layer, module))
                hooks.after(module, lambda *_, layer=layer: self._exit(layer), always=True)

    def collect(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Per layer, and per layer and head; NaN for blocks that were not seen, nothing at all where none was."""
        if not self._entropy_H:
            return {}, {}
        num_heads = max(entropy_H.numel() for entropy_H in self._entropy_H.values())
        sample = next(iter(self._entropy_H.values()))
        entropy_LH = sample.new_full((len(self._attentions), num_heads), torch.nan)
        for layer, entropy_H in self._entropy_H.items():
            entropy_LH[layer, : entropy_H.numel()] = entropy_H
        lowest_L = torch.where(entropy_LH.isnan(), torch.inf, entropy_LH).amin(dim=-1)
        layers = {
            "attention_entropy": entropy_LH.nanmean(dim=-1),
            "attention_entropy_min": torch.where(lowest_L.isinf(), torch.nan, lowest_L),
        }
        return layers, {"attention_entropy": entropy_LH}

    @property
    def num_layers(self) -> int:
        """In how many blocks attention was seen in this step."""
        return len(self._entropy_H)

    def _enter(self, layer: int, module: nn.Module) -> None:
        if layer not in self._entropy_H and layer not in self._open:
            num_heads = getattr(module, "num_heads", None)
            tap = AttentionTap(functools.partial(self._take, layer), num_heads)
            tap.__enter__()  # type: ignore[no-untyped-call]
            self._open[layer] = tap

    def _exit(self, layer: int) -> None:
        tap = self._open.pop(layer, None)
        if tap is not None:
            tap.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _take(self, layer: int, scores: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Runs inside the attention module's forward, between its own operations."""
        if layer not in self._entropy_H and self._hooks is not None:
            self._hooks.guard(self._measure, layer, scores)

    def _measure(self, layer: int, scores: Callable[[], tuple[Tensor, Tensor]]) -> None:
        scores_BHTS, visible_BHTS = scores()
        self._entropy_H[layer] = normalized_row_entropy(scores_BHTS, visible_BHTS).nanmean(dim=0)


class AttentionTap(TorchFunctionMode):
    """Passes every torch call through unchanged, and reports those that are attention."""

    def __init__(self, report: Callable[[Callable[[], tuple[Tensor, Tensor]]], None], num_heads: int | None) -> None:
        super().__init__()
        self._report = report
        self._num_heads = num_heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._report(functools.partial(sampled_scores, *args, **kwargs))
        elif func in SOFTMAX and args and isinstance(args[0], Tensor) and args[0].ndim >= 3:
            self._report(functools.partial(sampled_rows, args[0], self._num_heads))
        elif func is F.multi_head_attention_forward:
            with self._tapped_functional():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def _tapped_functional(self) -> Iterator[None]:
        original_attention, original_softmax = F.scaled_dot_product_attention, F.softmax
        thread = threading.get_ident()

        def attention(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                self._report(functools.partial(sampled_scores, *args, **kwargs))
            return original_attention(*args, **kwargs)

        def softmax(input: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                self._report(functools.partial(sampled_rows, input, self._num_heads))
            return original_softmax(input, *args, **kwargs)

        F.scaled_dot_product_attention, F.softmax = attention, softmax
        try:
            yield
        finally:
            F.scaled_dot_product_attention, F.softmax = original_attention, original_softmax


def sampled_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scores and visibility (B, H, rows, S) of a few queries, for the arguments of `scaled_dot_product_attention`.

    Dropout is no part of attention's entropy. Fewer key heads than query heads (grouped queries) are matched up.
    """
    query_BHTD, key_BHSD = query.detach(), key.detach()
    if query_BHTD.ndim == 3:
        query_BHTD, key_BHSD = query_BHTD.unsqueeze(1), key_BHSD.unsqueeze(1)
    num_heads, num_queries, num_keys = query_BHTD.shape[1], query_BHTD.shape[2], key_BHSD.shape[2]
    num_samples, rows = _choose(query_BHTD.shape[0], num_heads, num_queries, num_keys, query_BHTD.device)
    query_BHTD = query_BHTD[:num_samples].index_select(2, rows)
    key_BHSD = key_BHSD[:num_samples].repeat_interleave(num_heads // key_BHSD.shape[1], dim=1)
    scale = 1 / math.sqrt(query_BHTD.shape[-1]) if scale is None else scale
    scores_BHTS = (query_BHTD.float() * scale) @ key_BHSD.float().transpose(-2, -1)
    visible_BHTS = torch.ones((), dtype=torch.bool, device=rows.device).expand(scores_BHTS.shape)
    if is_causal:
        visible_BHTS = visible_BHTS & (torch.arange(num_keys, device=rows.device) <= rows[:, None])
    if attn_mask is not None:
        mask = attn_mask.detach()
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        mask = mask[:num_samples] if mask.shape[0] > 1 else mask
        mask = mask.index_select(2, rows) if mask.shape[2] > 1 else mask
        if mask.dtype == torch.bool:
            visible_BHTS = visible_BHTS & mask
        else:
            visible_BHTS = visible_BHTS & _is_visible(mask)
            scores_BHTS = scores_BHTS + mask.float()
    return scores_BHTS, visible_BHTS


def sampled_rows(scores: Tensor, num_heads: int | None) -> tuple[Tensor, Tensor]:
    """The same for scores that were materialised, (B, H, T, S) or (B * H, T, S), masked by very negative numbers."""
    scores = scores.detach()
    if scores.ndim == 3:
        num_heads = num_heads if num_heads and scores.shape[0] % num_heads == 0 else 1
        scores = scores.view(-1, num_heads, *scores.shape[1:])
    batch, heads, queries, keys = scores.shape[-4:]
    num_samples, rows = _choose(batch, heads, queries, keys, scores.device)
    scores_BHTS = scores[:num_samples].index_select(2, rows).float()
    return scores_BHTS, _is_visible(scores_BHTS)


def _is_visible(scores: Tensor) -> Tensor:
    """Masks are -inf, the dtype's lowest number, -1e9 or -1e4; no score of a working model comes near."""
    return scores > -5e3


def _choose(batch: int, heads: int, queries: int, keys: int, device: torch.device) -> tuple[int, Tensor]:
    """How many sequences, and which query rows: one from the middle of each of equally long stretches."""
    num_rows = min(queries, MAX_ROWS, max(MIN_ROWS, TARGET_WEIGHTS // (heads * keys)))
    num_samples = min(batch, max(1, TARGET_WEIGHTS // (heads * keys * num_rows)))
    rows = (torch.arange(num_rows, device=device) * 2 + 1) * queries // (2 * num_rows)
    return num_samples, rows
