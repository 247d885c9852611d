"""How much a model's predictions depend on its input. Axes: B samples, T tokens, N predictions, R chosen ones, V classes."""

from __future__ import annotations

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures.choosing import evenly_spread
from tsemon.measures.linear import ratio

__all__ = ["output_variation"]

MAX_PREDICTIONS = 256


def output_variation(logits: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Return how much the predictions differ: token diversity of the predicted probabilities.

    |Q - P Q|^2 / |Q|^2 with the rows q_i = softmax(logits_i) and P = 11'/R                (tsemon)

    Takes logits (..., V), all leading axes being predictions, and for (B, T, V) optionally which tokens count (B, T); of
    more than 256 predictions 256, evenly spread. Returns a scalar in float32, from 0 (all inputs get the same answer) to 1.
    Predictions with NaN do not count; NaN unless two are left. Raises ShapeError for fewer than two axes.
    """
    if logits.ndim < 2:
        raise ShapeError(f"logits need axes (..., predictions, classes), got {tuple(logits.shape)}")
    logits_NV = logits.detach().flatten(0, -2)
    if valid_BT is None or logits.ndim != 3:
        valid_N = torch.ones(logits_NV.shape[:1], dtype=torch.bool, device=logits.device)
    else:
        valid_N = valid_BT.flatten()
    index_R, is_chosen_R = evenly_spread(valid_N, MAX_PREDICTIONS)
    p_RV = logits_NV.index_select(0, index_R).float().softmax(dim=-1)
    counts_R1 = (is_chosen_R & p_RV.sum(dim=-1).isfinite())[:, None]
    count = counts_R1.sum()
    p_RV = torch.where(counts_R1, p_RV, 0.0)
    own_RV = torch.where(counts_R1, p_RV - p_RV.sum(dim=0) / count, 0.0)
    variation = ratio(torch.linalg.vector_norm(own_RV), torch.linalg.vector_norm(p_RV)).square()
    return torch.where(count > 1, variation, torch.nan)
