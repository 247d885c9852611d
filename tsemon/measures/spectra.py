"""Effective ranks without waiting for a device: it makes small Gram matrices, the host decomposes them.

Axes: B samples, T tokens, D width, R chosen rows, K the shorter side of (R, D), L layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsemon.measures.choosing import evenly_spread
from tsemon.measures.linear import gram, rank_of, values_of_gram

MAX_ROWS = 256
"""Tokens, or mean tokens, that an effective rank is of."""


def token_gram(x_BTD: Tensor, valid_BT: Tensor | None, scale_B: Tensor, counts_B: Tensor) -> Tensor:
    """Gram matrix (K, K) of evenly spread tokens of the first sequence that counts, over its largest entry.

    NaN where no sequence counts, or where it is all zeros.
    """
    first = counts_B.int().argmax(dim=0, keepdim=True)
    valid_BT = x_BTD.new_ones(x_BTD.shape[:2], dtype=torch.bool) if valid_BT is None else valid_BT
    index_R, is_chosen_R = evenly_spread(valid_BT[first][0], MAX_ROWS)
    x_RD = torch.where(is_chosen_R[:, None], _wide(x_BTD[first, index_R]) / scale_B[first], 0.0)
    return torch.where(counts_B.any(), gram(x_RD), torch.nan)


def batch_gram(mean_BD: Tensor, counts_B: Tensor) -> Tensor:
    """Gram matrix (K, K) of evenly spread mean tokens of the samples that count, less their mean."""
    index_R, is_chosen_R = evenly_spread(counts_B, MAX_ROWS)
    x_RD = torch.where(is_chosen_R[:, None], _wide(mean_BD.index_select(0, index_R)), 0.0)
    x_RD = torch.where(is_chosen_R[:, None], x_RD - x_RD.sum(dim=0) / is_chosen_R.sum(), 0.0)
    return gram(x_RD)


def effective_ranks(gram_LKK: Tensor) -> Tensor:
    """Return the effective ranks of rows from their Gram matrices. For the host: it decomposes them.

    `measures.effective_rank` takes singular values of the rows themselves. From a float64 Gram matrix the rank is within
    2e-4 of that: singular values that are 0 come out as up to 3e-8 of the largest. From float32, which is all that MPS has,
    as up to 1e-3. NaN for zeros, NaN and infinities.
    """
    gram_LKK = gram_LKK.double()
    is_finite_L = gram_LKK.isfinite().all(dim=-1).all(dim=-1)
    rank_L = rank_of(values_of_gram(torch.where(is_finite_L[..., None, None], gram_LKK, 0.0)))
    return rank_L.float()


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()
