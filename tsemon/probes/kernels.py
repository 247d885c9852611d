"""What calls of attention kernels outside PyTorch's `scaled_dot_product_attention` say about their scores.

Axes: B samples, H heads, T queries, S keys, K width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tsemon.measures.scores import DotProducts, Modified, Scores

Mod = Callable[..., Tensor]


def flex_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    *_: Any,
    **__: Any,
) -> Scores:
    """Of `torch.nn.attention.flex_attention.flex_attention`. A block mask is read by its function, not by its blocks."""
    return Modified(DotProducts(query, key, scale=scale), score_mod, getattr(block_mask, "mask_mod", None))


def interface_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    module: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> Scores:
    """Of a function in Hugging Face's `AttentionInterface`: flash attention for one."""
    is_masked = isinstance(attention_mask, Tensor) and attention_mask.ndim == 4
    mask_mods = []
    if hasattr(attention_mask, "mask_mod"):
        mask_mods.append(attention_mask.mask_mod)
    elif not is_masked:  # then causality and the like are the kernel's to know
        is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        mask_mods += _kernel_masks(query, attention_mask, sliding_window, position_ids, cu_seq_lens_q)
    is_kernel_causal = bool(is_causal) and not is_masked and not hasattr(attention_mask, "mask_mod")
    scores = DotProducts(query, key, attention_mask if is_masked else None, is_kernel_causal, scaling)
    score_mod = None if softcap is None and position_bias is None else _score_mod(softcap, position_bias)
    return Modified(scores, score_mod, _all_of(mask_mods) if mask_mods else None)


def _kernel_masks(
    query: Tensor, padding: Tensor | None, window: int | None, position_ids: Tensor | None, starts: Tensor | None
) -> list[Mod]:
    masks: list[Mod] = []
    num_queries = query.shape[2]
    if isinstance(padding, Tensor):
        masks.append(lambda b, h, q, k: padding[b, k] != 0)
    if window is not None:
        masks.append(lambda b, h, q, k: (q - k).abs() < window)
    documents_T = None  # several in one sequence, each with positions from 0
    if starts is not None:
        places_T = torch.arange(num_queries, device=query.device)
        documents_T = torch.searchsorted(starts.to(places_T.dtype), places_T, right=True)
    elif position_ids is not None and padding is None and position_ids.shape == (1, num_queries):
        documents_T = (position_ids[0] == 0).cumsum(dim=0)
    if documents_T is not None:
        masks.append(lambda b, h, q, k: documents_T[q] == documents_T[k])
    return masks


def _all_of(mask_mods: list[Mod]) -> Mod:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = mask_mods[0](b, h, q, k)
        for other in mask_mods[1:]:
            visible = visible & other(b, h, q, k)
        return visible

    return mask_mod


def _score_mod(softcap: float | None, bias_BHTS: Tensor | None) -> Mod:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if bias_BHTS is None else score + bias_BHTS[b, h, q, k]

    return score_mod
