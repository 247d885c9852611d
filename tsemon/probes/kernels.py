"""What calls of attention kernels outside PyTorch's `scaled_dot_product_attention` say about their scores.

Axes: B samples, H heads, T queries, S keys, K width of a head, N tokens of several documents, one after the other.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
    mask_mods, documents_BT = [], None
    if hasattr(attention_mask, "mask_mod"):
        mask_mods.append(attention_mask.mask_mod)
    elif not is_masked:  # then causality and the like are the kernel's to know
        is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        documents_BT = _documents_of_interface(query, attention_mask, position_ids, cu_seq_lens_q)
        mask_mods += _kernel_masks(attention_mask, sliding_window, documents_BT)
    is_kernel_causal = bool(is_causal) and not is_masked and not hasattr(attention_mask, "mask_mod")
    scores = DotProducts(query, key, attention_mask if is_masked else None, is_kernel_causal, scaling)
    score_mod = None if softcap is None and position_bias is None else _score_mod(softcap, position_bias)
    told_BT = documents_BT if attention_mask is None else None  # padding counts in none
    return Modified(scores, score_mod, _all_of(mask_mods) if mask_mods else None, documents_BT=told_BT)


def _documents_of_interface(
    query: Tensor, padding: Tensor | None, position_ids: Tensor | None, starts: Tensor | None
) -> Tensor | None:
    """Documents that are packed, numbered from 1 and each with positions from 0; -1 behind the last one."""
    batch, _, num_queries, _ = query.shape
    if starts is not None:
        return _numbers(starts, batch * num_queries, query.device).view(batch, num_queries)
    if position_ids is not None and padding is None and position_ids.shape == (batch, num_queries) == (1, num_queries):
        return (position_ids == 0).cumsum(dim=1)
    return None


def _kernel_masks(padding: Tensor | None, window: int | None, documents_BT: Tensor | None) -> list[Mod]:
    masks: list[Mod] = []
    if isinstance(padding, Tensor):
        masks.append(lambda b, h, q, k: padding[b, k] != 0)
    if window is not None:
        masks.append(lambda b, h, q, k: (q - k).abs() < window)
    if documents_BT is not None:
        masks.append(lambda b, h, q, k: documents_BT[b, q] == documents_BT[b, k])
    return masks


def _numbers(starts: Tensor, num_tokens: int, device: torch.device) -> Tensor:
    """The document of each token, from 1; -1 for tokens of none."""
    numbers_N = torch.searchsorted(starts.to(torch.int64), torch.arange(num_tokens, device=device), right=True)
    return torch.where((numbers_N > 0) & (numbers_N < len(starts)), numbers_N, -1)


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


class Call(NamedTuple):
    """The tensors of a call of flash attention."""

    query_BHTK: Tensor
    key_BHSK: Tensor
    value_BHSK: Tensor
    starts: tuple[Tensor, Tensor] | None = None
    """Starts of the documents among queries and among keys, each followed by the end of the last one."""


class Kernel(NamedTuple):
    """A function that computes attention, known by its name in a package."""

    function: Callable[..., Any]
    read: Callable[[dict[str, Any]], Call]

    def is_read(self, *args: Any, **kwargs: Any) -> bool:
        """False if the call changes the scores in a way that tsemon cannot read."""
        given = self._bound(args, kwargs)
        return all(given.get(name) is None for name in UNREAD)

    def scores(self, *args: Any, **kwargs: Any) -> Scores:
        """The scores of a call with these arguments."""
        given = self._bound(args, kwargs)
        return _flash_scores(self.read(given), given)

    def values(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.read(self._bound(args, kwargs)).value_BHSK.detach()

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(inspect.signature(self.function).bind(*args, **kwargs).arguments)


def _tokens_before_heads(given: dict[str, Any]) -> Call:
    return Call(*(given[name].transpose(1, 2) for name in "qkv"))


def _packed_in_one(given: dict[str, Any]) -> Call:
    return Call(*(x_BTHK.transpose(1, 2) for x_BTHK in given["qkv"].unbind(dim=2)))


def _of_documents(given: dict[str, Any]) -> Call:
    return _documents((given["q"], given["k"], given["v"]), given["cu_seqlens_q"], given["cu_seqlens_k"])


def _of_documents_in_one(given: dict[str, Any]) -> Call:
    return _documents(given["qkv"].unbind(dim=1), given["cu_seqlens"], given["cu_seqlens"])


def _of_documents_of_torch(given: dict[str, Any]) -> Call:
    tensors, starts = (given["query"], given["key"], given["value"]), given["cu_seq_q"]
    return _documents(tensors, starts, starts if given["cu_seq_k"] is None else given["cu_seq_k"])


def _documents(tensors: tuple[Tensor, ...], starts_q: Tensor, starts_k: Tensor) -> Call:
    query, key, value = (x_NHK.transpose(0, 1)[None] for x_NHK in tensors)
    return Call(query, key, value, (starts_q, starts_k))


KERNELS: dict[str, dict[str, Callable[[dict[str, Any]], Call]]] = {
    package: {
        "flash_attn_func": _tokens_before_heads,
        "flash_attn_qkvpacked_func": _packed_in_one,
        "flash_attn_varlen_func": _of_documents,
        "flash_attn_varlen_qkvpacked_func": _of_documents_in_one,
    }
    for package in ("flash_attn", "flash_attn_interface")
} | {"torch.nn.attention.varlen": {"varlen_attn": _of_documents_of_torch}}
"""Functions of flash attention, version 2 and 3, and of PyTorch."""


UNREAD = ("alibi_slopes", "seqused_k", "block_table", "s_aux")


def known_kernels() -> Iterator[Kernel]:
    """Yield the kernels of packages that have been imported."""
    for package, names in KERNELS.items():
        for name, read in names.items():
            if (function := getattr(sys.modules.get(package), name, None)) is not None:
                yield Kernel(function, read)


def _flash_scores(call: Call, given: dict[str, Any]) -> Scores:
    left, right = given.get("window_size") or (-1, -1)
    is_causal = bool(given.get("causal") or given.get("is_causal"))
    right = 0 if is_causal else right
    num_queries, num_keys = call.query_BHTK.shape[2], call.key_BHSK.shape[2]
    is_plain = call.starts is None and left < 0 and num_queries == num_keys
    scale = given.get("softmax_scale", given.get("scale"))
    scores = DotProducts(call.query_BHTK, call.key_BHSK, None, is_plain and right == 0, scale)
    is_masked = not is_plain or right > 0
    visible = functools.partial(_visible, *_places(call), left, right) if is_masked else None
    softcap = given.get("softcap") or None
    score_mod = None if softcap is None else _score_mod(softcap, None)
    if call.starts is None:
        return Modified(scores, score_mod, visible)
    documents_BT = _numbers(call.starts[0], num_queries, scores.device)[None]
    return Modified(scores, score_mod, visible, documents_BT=documents_BT)


def _places(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The document of each query and of each key, and their places, counted from the end of the document."""
    sizes = call.query_BHTK.shape[2], call.key_BHSK.shape[2]
    device = call.query_BHTK.device
    starts = call.starts or tuple(torch.tensor([0, size], device=device) for size in sizes)
    numbers, places = [], []
    for size, starts_D in zip(sizes, starts, strict=True):
        place_N = torch.arange(size, device=device)
        number_N = torch.searchsorted(starts_D.to(place_N.dtype), place_N, right=True)
        ends_N = starts_D.index_select(0, number_N.clamp(max=len(starts_D) - 1))
        numbers.append(number_N)
        places.append(place_N - ends_N)
    return numbers[0], numbers[1], places[0], places[1]


def _visible(
    number_T: Tensor, number_S: Tensor, place_T: Tensor, place_S: Tensor, left: int, right: int,
    b: Tensor, h: Tensor, q: Tensor, k: Tensor,
) -> Tensor:  # fmt: skip
    """Causality and windows are counted from the last query, which is at the last key."""
    ahead = place_S[k] - place_T[q]
    visible = number_T[q] == number_S[k]
    visible = visible if right < 0 else visible & (ahead <= right)
    return visible if left < 0 else visible & (-ahead <= left)
