"""Measures of the values that attention averages.

Axes: B any leading axes, H heads, T tokens, K width of a head, D the heads side by side, N the shorter side of (T, D), L
layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsemon.measures.linear import (
    as_tokens,
    checked_tokens,
    gram,
    power_of_two,
    singular_values,
    undefined_unless_finite,
    widened,
)
from tsemon.measures.tokens import first_ratio

__all__ = ["first_value_norm_ratio", "value_spectrum", "value_top_eigenvalue"]


def value_spectrum(v_BTD: Tensor) -> Tensor:
    """How the energy of the values spreads over directions.

    Eigenvalues of C = 1/l sum_i v_i v_i'            (Value Residual Learning, arXiv 2410.17897, Eq. 12)

    Not centred; for one layer's spectrum as the paper means it, put the heads side by side in D. Takes V (..., T, D),
    returns (..., D), >= 0 and descending, zeros beyond the rank, in float64 whatever V is: the square of 1e20 is no
    float32. NaN where V holds NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    v_BTD = as_tokens(v_BTD)
    num_tokens, width = v_BTD.shape[-2:]
    spectrum_BK = singular_values(v_BTD).square() / num_tokens
    return torch.nn.functional.pad(spectrum_BK, (0, width - spectrum_BK.shape[-1]))


def first_value_norm_ratio(v_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Length of the first token's value against the mean length of the others'. A drained sink is near 0.

    |v_1| / mean over i > 1 of |v_i|                  (Value Residual Learning, arXiv 2410.17897, Figure 2)

    Takes V (..., T, D), heads side by side, and optionally which tokens count (..., T); returns (...), >= 0. NaN for one
    token, or where all others are zero, or where V holds NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    v_BTD = widened(checked_tokens(v_BTD))
    if valid_BT is not None:
        v_BTD = torch.where(valid_BT.unsqueeze(-1), v_BTD, 0.0)
    v_BTD = undefined_unless_finite(v_BTD)
    # A length needs no unit of its own, but its square must be a float32.
    return first_ratio(value_lengths((v_BTD / power_of_two(v_BTD, (-2, -1))).unsqueeze(-3), valid_BT), valid_BT)


def value_lengths(v_BHTK: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Lengths (..., T) of values whose heads are side by side in thought; 0 for padding, whatever it holds."""
    v_BTD = v_BHTK.transpose(-3, -2).flatten(-2)  # mostly a view; a norm over two axes apart is slow on a CPU
    length_BT = torch.linalg.vector_norm(v_BTD, dim=-1, dtype=torch.promote_types(v_BHTK.dtype, torch.float32))
    return length_BT if valid_BT is None else torch.where(valid_BT, length_BT, 0.0)


def value_top_eigenvalue(v_BTD: Tensor) -> Tensor:
    """Return the largest eigenvalue of the values' second moment.

    lambda_1 of C = 1/l sum_i v_i v_i'               (Value Residual Learning, arXiv 2410.17897, Eq. 12)

    The first entry of `value_spectrum`, from a Gram matrix. Takes V (..., T, D), heads side by side, returns (...), >= 0 in
    float64. NaN where V holds NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    v_BTD = checked_tokens(v_BTD)
    return top_eigenvalues(second_moment(v_BTD, v_BTD.new_ones(v_BTD.shape[:-1], dtype=torch.bool)))


def second_moment(v_BTD: Tensor, valid_BT: Tensor) -> Tensor:
    """1/T V V' or 1/T V' V of the valid tokens in float64, whichever is smaller: their largest eigenvalue is the same."""
    v_BTD = v_BTD.detach().double()
    v_BTD = torch.where(valid_BT[..., None], v_BTD, 0.0) / valid_BT.sum(dim=-1).double().sqrt()[..., None, None]
    return gram(v_BTD)


def top_eigenvalues(moments_LNN: Tensor) -> Tensor:
    """The largest eigenvalue of each. For the host: it decomposes them. NaN for NaN and infinities, where LAPACK raises."""
    is_finite_L = moments_LNN.isfinite().all(dim=-1).all(dim=-1)
    top_L = torch.linalg.eigvalsh(torch.where(is_finite_L[..., None, None], moments_LNN, 0.0))[..., -1]
    return torch.where(is_finite_L, top_L.clamp_min(0), torch.nan)


def heads_side_by_side(values_HTK: Tensor) -> Tensor:
    """(T, H K). Some models repeat each key head for the query heads that share it, others leave that to the kernel: a head
    that equals the one before it is zero here, and so counts once."""
    is_repeated_H = (values_HTK[1:] == values_HTK[:-1]).all(dim=-1).all(dim=-1)
    kept_HTK = torch.cat([values_HTK[:1], values_HTK[1:].masked_fill(is_repeated_H[:, None, None], 0.0)])
    return kept_HTK.transpose(0, 1).flatten(1)
