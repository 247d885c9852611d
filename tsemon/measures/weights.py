"""What a layer's weights would do to tokens at infinite depth: Setting the Record Straight on Transformer Oversmoothing.

Axes: B any leading axes, T tokens, D width, I eigenvalues of A, J eigenvalues of H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures.linear import eigenvalues

__all__ = ["DominatingEigenvalue", "dominating_eigenvalue"]

Kinds: TypeAlias = "str | list[Kinds]"
_KINDS = ("perron", "lowest", "tie", "other", "undefined")
_TOLERANCE = 1e-6
"""Eigenvalues nearer than this, relative to the largest, are one: float32 weights tell no more."""


@dataclass(frozen=True, slots=True)
class DominatingEigenvalue:
    """Which eigenvalue of I + H (x) A wins over depth; every tensor has the leading axes of the inputs."""

    kind: Kinds
    """One word, or nested lists of words for leading axes.

    "perron": only pairs with A's eigenvalue 1 win, and every token converges to the same vector. "lowest": only pairs
    with A's smallest real eigenvalue win, and tokens do not converge. "tie": both, or a "perron" whose eigenvalue 1 is
    not simple, so that groups of tokens stay apart. "other": an eigenvalue in between, or a complex one, takes part.
    "undefined": NaN or infinities.
    """
    modulus: Tensor
    """|1 + lambda_H lambda_A| of the winner."""
    lambda_1: Tensor
    """A's smallest real eigenvalue."""
    spectrum_is_real: Tensor
    """Whether A's eigenvalues are all real, which the paper takes for granted and most attention does not have."""


def dominating_eigenvalue(a_BTT: Tensor, h_BDD: Tensor) -> DominatingEigenvalue:
    """What X_l = X_(l-1) + A X_(l-1) H leads to as depth grows.

    max over i, j of |1 + lambda_j(H) lambda_i(A)|                (Transformer Oversmoothing, Definition 4 and Theorem 1)

    Takes row-stochastic A (..., T, T) and H (..., D, D), whose leading axes must broadcast. All pairs are compared: the
    paper's two types are not all there are when A is not symmetric. H = W_V W_proj, which in torch's Linear layers is
    value.weight.T @ projection.weight.T. Eigenvalues within 1e-6 of the largest count as equal. Decomposes both matrices
    exactly, O(T^3 + D^3): for checkpoints, not for steps. Raises ShapeError unless both are square.
    """
    for name, matrix in (("A", a_BTT), ("H", h_BDD)):
        if matrix.ndim < 2 or matrix.shape[-2] != matrix.shape[-1] or matrix.shape[-1] == 0:
            raise ShapeError(f"{name} needs axes (..., size, size), got {tuple(matrix.shape)}")
    dtype = torch.promote_types(torch.promote_types(a_BTT.dtype, h_BDD.dtype), torch.float32)
    a_BI, h_BJ = eigenvalues(a_BTT), eigenvalues(h_BDD)
    modulus_BIJ = (1 + a_BI[..., :, None] * h_BJ[..., None, :]).abs()
    modulus_B = modulus_BIJ.amax(dim=(-2, -1))
    wins_BI = (modulus_BIJ >= (1 - _TOLERANCE) * modulus_B[..., None, None]).any(dim=-1)

    close = _TOLERANCE * a_BI.abs().amax(dim=-1, keepdim=True)
    is_real_BI = a_BI.imag.abs() <= close
    lambda_1_B1 = torch.where(is_real_BI, a_BI.real, torch.inf).amin(dim=-1, keepdim=True)
    is_perron_BI = (a_BI - a_BI.real.amax(dim=-1, keepdim=True)).abs() <= close
    is_lowest_BI = ((a_BI - lambda_1_B1).abs() <= close) & ~is_perron_BI
    has_perron_B = (wins_BI & is_perron_BI).any(dim=-1)
    has_lowest_B = (wins_BI & is_lowest_BI).any(dim=-1)
    has_other_B = (wins_BI & ~is_perron_BI & ~is_lowest_BI).any(dim=-1)
    is_tie_B = has_perron_B & (has_lowest_B | (is_perron_BI.sum(dim=-1) > 1))

    code_B = torch.where(has_lowest_B, 1, 0)
    for code, applies_B in ((2, is_tie_B), (3, has_other_B), (4, modulus_B.isnan())):
        code_B = torch.where(applies_B, code, code_B)
    return DominatingEigenvalue(
        kind=_words(code_B.tolist()),
        modulus=modulus_B.to(dtype),
        lambda_1=torch.where(modulus_B.isnan(), torch.nan, lambda_1_B1[..., 0]).to(dtype),
        spectrum_is_real=is_real_BI.all(dim=-1),
    )


def _words(codes: int | list[int]) -> Kinds:
    return _KINDS[codes] if isinstance(codes, int) else [_words(c) for c in codes]
