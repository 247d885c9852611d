"""Changes of the three measures of oversmoothing by the sub-steps of a block.

Attention with its residual makes Y from the block's input X, the feed-forward part with its residual Z from Y, a norm N(U)
from U. Axes: any leading ones, T tokens, D width. Definitions: Setting the Record Straight on Transformer Oversmoothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures.escalation import Lengths
from tsemon.measures.linear import ratio
from tsemon.measures.tokens import cosine_of, effective_rank, token_statistics

__all__ = [
    "feedforward_cosine_change",
    "feedforward_hfc_lfc_ratio",
    "feedforward_rank_ratio",
    "norm1_cosine_change",
    "norm1_hfc_lfc_ratio",
    "norm1_rank_ratio",
    "norm2_cosine_change",
    "norm2_hfc_lfc_ratio",
    "norm2_rank_ratio",
    "residual_cosine_change",
    "residual_hfc_lfc_ratio",
    "residual_rank_ratio",
]


def hfc_lfc_ratio_of(x: Lengths, y: Lengths) -> Tensor:
    return ratio(ratio(y.own, y.shared), ratio(x.own, x.shared))


def cosine_change_of(x: Lengths, y: Lengths) -> Tensor:
    return cosine_of(y.unit_mean, y.num_tokens) - cosine_of(x.unit_mean, x.num_tokens)


def residual_hfc_lfc_ratio(x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Return the factor by which attention with its residual changes HFC/LFC: above 1 it sharpens, below 1 it smooths.

    (|Y - P Y| / |P Y|) / (|X - P X| / |P X|), P = 11'/T             (Transformer Oversmoothing, Definition 1)

    Takes X and Y (..., T, D), returns (...), >= 0. NaN if the tokens of X are equal, or if the mean token of X or Y is 0.
    Raises ShapeError if the two differ in shape.
    """
    return hfc_lfc_ratio_of(*_pair(x_BTD, y_BTD))


def feedforward_hfc_lfc_ratio(y_BTD: Tensor, z_BTD: Tensor) -> Tensor:
    """Return the factor by which the feed-forward part with its residual changes HFC/LFC.

    (|Z - P Z| / |P Z|) / (|Y - P Y| / |P Y|), P = 11'/T             (Transformer Oversmoothing, Definition 1)

    Takes Y and Z (..., T, D), returns (...), >= 0. As `residual_hfc_lfc_ratio`.
    """
    return hfc_lfc_ratio_of(*_pair(y_BTD, z_BTD))


def norm1_hfc_lfc_ratio(*norms: tuple[Tensor, Tensor]) -> Tensor:
    """Return the factor by which attention's norm changes HFC/LFC, the product if there are several.

    (|N(U) - P N(U)| / |P N(U)|) / (|U - P U| / |P U|), P = 11'/T    (Transformer Oversmoothing, Definition 1)

    Takes pairs of (..., T, D), returns (...), >= 0. As `residual_hfc_lfc_ratio`.
    """
    return torch.stack([residual_hfc_lfc_ratio(*norm) for norm in norms]).prod(dim=0)


def norm2_hfc_lfc_ratio(*norms: tuple[Tensor, Tensor]) -> Tensor:
    """Return the factor by which the feed-forward part's norm changes HFC/LFC, the product if there are several.

    (|N(U) - P N(U)| / |P N(U)|) / (|U - P U| / |P U|), P = 11'/T    (Transformer Oversmoothing, Definition 1)

    Takes pairs of (..., T, D), returns (...), >= 0. As `residual_hfc_lfc_ratio`.
    """
    return norm1_hfc_lfc_ratio(*norms)


def residual_cosine_change(x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Return by how much attention with its residual changes the mean cosine between two tokens: above 0 it smooths.

    t_cos(Y) - t_cos(X)                                              (Transformer Oversmoothing, Definition 2)

    Takes X and Y (..., T, D), returns (...), from -2 to 2. NaN for one token, or if a token is zero. Raises ShapeError if
    the two differ in shape.
    """
    return cosine_change_of(*_pair(x_BTD, y_BTD))


def feedforward_cosine_change(y_BTD: Tensor, z_BTD: Tensor) -> Tensor:
    """Return by how much the feed-forward part with its residual changes the mean cosine between two tokens.

    t_cos(Z) - t_cos(Y)                                              (Transformer Oversmoothing, Definition 2)

    Takes Y and Z (..., T, D), returns (...), from -2 to 2. As `residual_cosine_change`.
    """
    return cosine_change_of(*_pair(y_BTD, z_BTD))


def norm1_cosine_change(*norms: tuple[Tensor, Tensor]) -> Tensor:
    """Return by how much attention's norm changes the mean cosine between two tokens, the sum if several.

    t_cos(N(U)) - t_cos(U), U the input of a norm                    (Transformer Oversmoothing, Definition 2)

    Takes pairs of (..., T, D), returns (...). As `residual_cosine_change`.
    """
    return torch.stack([residual_cosine_change(*norm) for norm in norms]).sum(dim=0)


def norm2_cosine_change(*norms: tuple[Tensor, Tensor]) -> Tensor:
    """Return by how much the feed-forward part's norm changes the mean cosine between two tokens, the sum if several.

    t_cos(N(U)) - t_cos(U), U the input of a norm                    (Transformer Oversmoothing, Definition 2)

    Takes pairs of (..., T, D), returns (...). As `residual_cosine_change`.
    """
    return norm1_cosine_change(*norms)


def residual_rank_ratio(x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Return the factor by which attention with its residual changes the effective rank: above 1 it sharpens.

    effective_rank(Y) / effective_rank(X)                            (Transformer Oversmoothing, Definition 3)

    Takes X and Y (..., T, D), returns (...), > 0. NaN if either is zero. Raises ShapeError if the two differ in shape.
    """
    _pair(x_BTD, y_BTD)
    return effective_rank(y_BTD) / effective_rank(x_BTD)


def feedforward_rank_ratio(y_BTD: Tensor, z_BTD: Tensor) -> Tensor:
    """Return the factor by which the feed-forward part with its residual changes the effective rank.

    effective_rank(Z) / effective_rank(Y)                            (Transformer Oversmoothing, Definition 3)

    Takes Y and Z (..., T, D), returns (...), > 0. As `residual_rank_ratio`.
    """
    return residual_rank_ratio(y_BTD, z_BTD)


def norm1_rank_ratio(*norms: tuple[Tensor, Tensor]) -> Tensor:
    """Return the factor by which attention's norm changes the effective rank, the product if there are several.

    effective_rank(N(U)) / effective_rank(U), U the input of a norm  (Transformer Oversmoothing, Definition 3)

    Takes pairs of (..., T, D), returns (...), > 0. As `residual_rank_ratio`.
    """
    return torch.stack([residual_rank_ratio(*norm) for norm in norms]).prod(dim=0)


def norm2_rank_ratio(*norms: tuple[Tensor, Tensor]) -> Tensor:
    """Return the factor by which the feed-forward part's norm changes the effective rank, the product if there are several.

    effective_rank(N(U)) / effective_rank(U), U the input of a norm  (Transformer Oversmoothing, Definition 3)

    Takes pairs of (..., T, D), returns (...), > 0. As `residual_rank_ratio`.
    """
    return norm1_rank_ratio(*norms)


def _pair(x_BTD: Tensor, y_BTD: Tensor) -> tuple[Lengths, Lengths]:
    if x_BTD.shape != y_BTD.shape:
        raise ShapeError(
            f"the states before and after a sub-step need the same axes, got {tuple(x_BTD.shape)} and {tuple(y_BTD.shape)}"
        )
    return Lengths.of(token_statistics(x_BTD)), Lengths.of(token_statistics(y_BTD))
