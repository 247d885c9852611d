"""Which units of a feed-forward part do not work. Axes: B samples, T tokens, F units."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsemon.errors import ShapeError

__all__ = ["dead_units"]


def dead_units(z_BTF: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Return the fraction of units that have the same value at every token.

    mean over units of [max over tokens of z - min over tokens of z is 0]                  (tsemon)

    Takes the input of the last layer (..., B, T, F) and optionally which tokens count (..., B, T); returns (...), from 0 to
    1. Samples that are not finite do not count. NaN unless two tokens count: one cannot vary. Raises ShapeError for fewer
    than three axes.
    """
    if z_BTF.ndim < 3:
        raise ShapeError(f"units need axes (..., samples, tokens, units), got {tuple(z_BTF.shape)}")
    z_BTF = z_BTF.detach()
    if valid_BT is None:
        lowest_BF, highest_BF = z_BTF.amin(dim=-2), z_BTF.amax(dim=-2)
        count_B = z_BTF.new_full(z_BTF.shape[:-2], z_BTF.shape[-2], dtype=torch.float32)
    else:
        lowest_BF = torch.where(valid_BT[..., None], z_BTF, math.inf).amin(dim=-2)
        highest_BF = torch.where(valid_BT[..., None], z_BTF, -math.inf).amax(dim=-2)
        count_B = valid_BT.sum(dim=-1, dtype=torch.float32)
    counts_B = lowest_BF.isfinite().all(dim=-1) & highest_BF.isfinite().all(dim=-1)
    highest_F = torch.where(counts_B[..., None], highest_BF, -math.inf).amax(dim=-2)
    lowest_F = torch.where(counts_B[..., None], lowest_BF, math.inf).amin(dim=-2)
    share = (highest_F == lowest_F).float().mean(dim=-1)
    return torch.where(torch.where(counts_B, count_B, 0.0).sum(dim=-1) > 1, share, torch.nan)
