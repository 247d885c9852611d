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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tsemon.measures import normalized_row_entropy
from tsemon.probes.discovery import Block, is_compiled, may_take_fast_path
from tsemon.probes.hooks import Guard, Hooks
from tsemon.probes.padding import Padding
from tsemon.probes.part import Part, Partial, Reading, counted, mean, stacked

MAX_ROWS = 64
"""Query rows weighed per head at the most, evenly spread. 32 of 1,024 rows, all that 8 heads leave, miss by 0.004 (sd)."""
TARGET_WEIGHTS = 2**18
"""Attention weights computed per layer, as long as this leaves a sequence and `MIN_ROWS`: caps time and memory."""
MIN_ROWS = 8


class Sampled(NamedTuple):
    """A few query rows of one attention."""

    scores_BHTS: Tensor
    visible_BHTS: Tensor
    """Which keys each query may see."""
    rows: Tensor
    """The queries' positions."""
    size: tuple[int, int]
    """Sequences and queries that there are in all."""


class AttentionProbe(Part):
    """Row entropy per head of every block's self-attention in one forward pass."""

    METRICS = ("attention_entropy", "attention_entropy_min")

    def __init__(self, blocks: list[Block], depth: int, padding: Padding) -> None:
        self._blocks = blocks
        self._depth = depth
        self._padding = padding
        self._sums_H: dict[int, dict[str, Tensor]] = {}

    def forget(self) -> None:
        self._sums_H = {}

    def listen(self, hooks: Hooks) -> None:
        """Tap the blocks' attention for the pass that begins."""
        self.forget()
        tapped = set[int]()
        for block in self._blocks:
            # Of one attention that several blocks share, only the first layer's pass could be told from the others.
            if block.attention is None or id(block.attention) in tapped or is_compiled(block.module):
                continue
            tapped.add(id(block.attention))
            has_fast_path = any(isinstance(part, nn.MultiheadAttention) for part in block.attention.modules())
            if not (has_fast_path and may_take_fast_path(block.attention)):
                take = functools.partial(self._take, hooks.guard, block)
                num_heads = getattr(block.attention, "num_heads", None)
                hooks.within(block.attention, functools.partial(AttentionTap, take, num_heads))

    def collect(self) -> dict[str, Partial]:
        found: dict[str, Partial] = {}
        for name in {name for sums_H in self._sums_H.values() for name in sums_H}:
            found[name] = Partial(stacked(self._sums_H.get(layer, {}).get(name) for layer in range(self._depth)))
        return found

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if "attention_entropy" not in sums:
            return Reading()
        entropy_LH = mean(sums, "attention_entropy")
        lowest_L = torch.where(entropy_LH.isnan(), torch.inf, entropy_LH).amin(dim=-1)
        layers = {
            "attention_entropy": entropy_LH.nanmean(dim=-1),
            "attention_entropy_min": torch.where(lowest_L.isinf(), torch.nan, lowest_L),
        }
        return Reading(dict(layers), {"attention_entropy": entropy_LH})

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if without := [block.name for block in self._blocks if block.attention is None]:
            return dict.fromkeys(self.METRICS, f"found no self-attention in {', '.join(without)}")
        if (missed := len(self._blocks) - len(self._sums_H)) > 0:
            return dict.fromkeys(
                self.METRICS,
                f"attention was not seen in {missed} of {len(self._blocks)} blocks: {why_unseen}, or the block computed it "
                "without scaled_dot_product_attention or softmax",
            )
        return {}

    def _take(self, guard: Guard, block: Block, scores: Callable[[], Sampled]) -> None:
        """Runs inside the attention module's forward, between its own operations."""
        if block.number not in self._sums_H:
            guard.run(self._measure, block, scores)

    def _measure(self, block: Block, scores: Callable[[], Sampled]) -> None:
        scores_BHTS, visible_BHTS, rows, size = scores()
        valid_BT = self._padding.valid(block.stack, *size)
        if valid_BT is not None:  # padding asks nothing
            valid_BT = valid_BT[: scores_BHTS.shape[0]].index_select(1, rows)
            visible_BHTS = visible_BHTS & valid_BT[:, None, :, None]
        self._sums_H[block.number] = counted("attention_entropy", normalized_row_entropy(scores_BHTS, visible_BHTS))


class AttentionTap(TorchFunctionMode):
    """Passes every torch call through unchanged, and reports those that are attention."""

    def __init__(self, report: Callable[[Callable[[], Sampled]], None], num_heads: int | None) -> None:
        super().__init__()
        self._report = report
        self._num_heads = num_heads

    def __exit__(self, *error: Any) -> None:
        # An interrupt may hit torch in the middle of a change of modes. That it was one is what the user must see.
        with suppress(RuntimeError):
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with _tapped_functional(self):
                return func(*args, **kwargs)
        self.see(func, args, kwargs)
        return func(*args, **kwargs)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report the call if it is attention."""
        if func is _attention:
            self._report(functools.partial(sampled_scores, *args, **kwargs))
        elif func in SOFTMAX:
            scores = kwargs["input"] if "input" in kwargs else args[0] if args else None
            dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else None
            if isinstance(scores, Tensor) and scores.ndim >= 3 and dim in (-1, scores.ndim - 1):
                self._report(functools.partial(sampled_rows, scores, self._num_heads))


_attention, _softmax = F.scaled_dot_product_attention, F.softmax
SOFTMAX = {torch.softmax, _softmax, Tensor.softmax}

_listening = threading.local()
_replacing = threading.Lock()
_replaced: list[tuple[Any, Any]] = []
"""What stood under the two names, one entry per call of `multi_head_attention_forward` that is under way."""


@contextmanager
def _tapped_functional(tap: AttentionTap) -> Iterator[None]:
    """Let `tap` see what `multi_head_attention_forward` calls on this thread.

    All threads share the names, so they are replaced by the first that listens and put back by the last.
    """
    taps = _listening.__dict__.setdefault("taps", [])
    with _replacing:
        _replaced.append((F.scaled_dot_product_attention, F.softmax))
        if len(_replaced) == 1:
            F.scaled_dot_product_attention = _told(F.scaled_dot_product_attention, _attention)
            F.softmax = _told(F.softmax, _softmax)
    taps.append(tap)
    try:
        yield
    finally:
        taps.remove(tap)
        with _replacing:
            if len(_replaced) == 1:
                F.scaled_dot_product_attention, F.softmax = _replaced[0]
            _replaced.pop()


def _told(function: Callable[..., Any], known_as: Any) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        for tap in getattr(_listening, "taps", ()):
            tap.see(known_as, args, kwargs)
        return function(*args, **kwargs)

    return told


def sampled_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Sampled:
    """Scores (B, H, rows, S) of a few queries, for the arguments of `scaled_dot_product_attention`.

    Dropout is no part of attention's entropy. Fewer key heads than query heads (grouped queries) are matched up.
    """
    query_BHTD, key_BHSD = query.detach(), key.detach()
    if query_BHTD.ndim == 3:
        query_BHTD, key_BHSD = query_BHTD.unsqueeze(1), key_BHSD.unsqueeze(1)
        attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
    num_heads, num_queries, num_keys = query_BHTD.shape[1], query_BHTD.shape[2], key_BHSD.shape[2]
    batch = query_BHTD.shape[0]
    num_samples, rows = _choose(batch, num_heads, num_queries, num_keys, query_BHTD.device)
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
            scores_BHTS = scores_BHTS + mask.float()
            visible_BHTS = visible_BHTS & _is_visible(scores_BHTS)
    return Sampled(scores_BHTS, visible_BHTS, rows, (batch, num_queries))


def sampled_rows(scores: Tensor, num_heads: int | None) -> Sampled:
    """The same for scores that were materialised, (B, H, T, S) or (B * H, T, S), masked by very negative numbers."""
    scores = scores.detach()
    if scores.ndim == 3:
        num_heads = num_heads if num_heads and scores.shape[0] % num_heads == 0 else 1
        scores = scores.view(-1, num_heads, *scores.shape[1:])
    batch, heads, queries, keys = scores.shape[-4:]
    num_samples, rows = _choose(batch, heads, queries, keys, scores.device)
    scores_BHTS = scores[:num_samples].index_select(2, rows).float()
    return Sampled(scores_BHTS, _is_visible(scores_BHTS), rows, (batch, queries))


def _is_visible(scores: Tensor) -> Tensor:
    """Masks are -inf, the dtype's lowest number, -1e9 or -1e4: far below what the query scores highest."""
    highest = scores.amax(dim=-1, keepdim=True)
    return (scores > highest - 9e3) & (highest > torch.finfo(torch.float16).min)


def _choose(batch: int, heads: int, queries: int, keys: int, device: torch.device) -> tuple[int, Tensor]:
    """How many sequences, and which query rows: one from the middle of each of equally long stretches."""
    num_rows = min(queries, MAX_ROWS, max(MIN_ROWS, TARGET_WEIGHTS // (heads * keys)))
    num_samples = min(batch, max(1, TARGET_WEIGHTS // (heads * keys * num_rows)))
    rows = (torch.arange(num_rows, device=device) * 2 + 1) * queries // (2 * num_rows)
    return num_samples, rows
