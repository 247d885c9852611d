"""What attention's values look like. Axes: B any leading axes, T tokens, D width of the values."""

from __future__ import annotations

import torch
from torch import Tensor

from tsemon.measures.linear import as_tokens, length, ratio, singular_values


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


def first_value_norm_ratio(v_BTD: Tensor) -> Tensor:
    """Length of the first token's value against the mean length of the others'. A drained sink is near 0.

    |v_1| / mean over i > 1 of |v_i|                  (Value Residual Learning, arXiv 2410.17897, Figure 2)

    Takes V (..., T, D), returns (...), >= 0. NaN for one token, or where all others are zero, or where V holds NaN or
    infinities. Raises ShapeError for fewer than two axes.
    """
    length_BT = length(as_tokens(v_BTD), -1)
    return ratio(length_BT[..., 0], length_BT[..., 1:].mean(dim=-1))
