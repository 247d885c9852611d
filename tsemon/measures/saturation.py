"""How near a network is to its limit of infinitely large parameters. Axes: B any leading axes, T tokens, D width, R tokens
of all samples that are compared."""

from __future__ import annotations

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures.linear import as_tokens, length, ratio
from tsemon.measures.sums import Partial, Partials, counted

__all__ = ["saturation"]


def saturation(f_BTD: Tensor, f_scaled_BTD: Tensor) -> Tensor:
    """How near a network is to its limit of infinitely large parameters: mean cosine of its tokens in both.

    mean over i of cos(f_i(x; theta), f_i(x; c theta)), c large      (Parameter Norm Growth, arXiv 2010.09697, Section
    4.1)

    Takes both representations (..., T, D), returns (...) in [-1, 1]: 1 saturated. Comparable only within one
    architecture. NaN where a token is zero, or holds NaN or infinities. Raises ShapeError where the two differ in
    shape.
    """
    if f_BTD.shape != f_scaled_BTD.shape:
        raise ShapeError(
            f"both representations need the same axes (..., tokens, width), got {tuple(f_BTD.shape)} and "
            f"{tuple(f_scaled_BTD.shape)}"
        )
    f_BTD, f_scaled_BTD = as_tokens(f_BTD), as_tokens(f_scaled_BTD)
    unit_BTD, unit_scaled_BTD = (ratio(x, length(x, -1)[..., None]) for x in (f_BTD, f_scaled_BTD))
    return (unit_BTD * unit_scaled_BTD).sum(dim=-1).mean(dim=-1).clamp(-1, 1)


def saturation_sums(f_RD: Tensor, f_scaled_RD: Tensor, is_token_R: Tensor | None) -> Partials:
    """Sum and number of the cosines of single tokens; padding and tokens without a direction do not count.

    NaN if a token of the scaled network has overflowed: without those it would be the mean of the tame ones.
    """
    cosine_R = saturation(f_RD[:, None], f_scaled_RD[:, None])  # of one token each
    has_overflowed_R = ~f_scaled_RD.isfinite().all(dim=-1)
    if is_token_R is not None:
        cosine_R = cosine_R.masked_fill(~is_token_R, torch.nan)
        has_overflowed_R = has_overflowed_R & is_token_R
    sums = counted("saturation", cosine_R)
    value = sums["saturation"].value.masked_fill(has_overflowed_R.any(), torch.nan)
    return sums | {"saturation": Partial(value)}
