"""How spread out attention is.

Axes: B any leading axes (samples, heads), Q queries, K keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsemon.errors import ShapeError


def row_entropy(weights_BQK: Tensor) -> Tensor:
    """Mean over queries of the entropy of their attention, in nats.

    H = mean over i of -sum_j A_ij log A_ij          (Attention Entropy Collapse, arXiv 2303.06296, Section 3)

    Takes A (..., Q, K) with rows that sum to 1, returns (...): from 0 (each query sees one key) to log K. NaN if a row
    is NaN. Raises ShapeError for fewer than two axes.
    """
    if weights_BQK.ndim < 2:
        raise ShapeError(f"attention needs axes (..., queries, keys), got {tuple(weights_BQK.shape)}")
    weights_BQK = weights_BQK.to(torch.promote_types(weights_BQK.dtype, torch.float32))
    entropy_BQ: Tensor = torch.special.entr(weights_BQK).sum(dim=-1)
    return entropy_BQ.mean(dim=-1)


def normalized_row_entropy(scores_BQK: Tensor, visible_BQK: Tensor) -> Tensor:
    """Entropy of softmax(scores) over the visible keys, as a share of the largest that the query can have.

    mean over i of H_i / log(v_i), v_i the number of keys that query i may see

    Takes scores and visibility (..., Q, K), returns (...) in [0, 1]: 1 uniform, 0 one-hot. Dividing by log v_i makes a
    causal model's early queries comparable with its late ones. Queries that see fewer than two keys have no entropy to
    speak of and are left out; NaN where that leaves none. Raises ShapeError where the two shapes differ.
    """
    if scores_BQK.shape != visible_BQK.shape or scores_BQK.ndim < 2:
        raise ShapeError(
            f"scores and visible need the same axes (..., queries, keys), got {tuple(scores_BQK.shape)} and "
            f"{tuple(visible_BQK.shape)}"
        )
    scores_BQK = scores_BQK.to(torch.promote_types(scores_BQK.dtype, torch.float32))
    log_weights_BQK = torch.log_softmax(scores_BQK.masked_fill(~visible_BQK, -torch.inf), dim=-1)
    # exp(l) * l at l = -inf is 0 * -inf: a weight of zero adds nothing to the entropy.
    entropy_BQ = -(log_weights_BQK.exp() * log_weights_BQK.masked_fill(~visible_BQK, 0.0)).sum(dim=-1)
    num_visible_BQ = visible_BQK.sum(dim=-1)
    share_BQ = entropy_BQ / num_visible_BQ.to(scores_BQK.dtype).log()
    return torch.where(num_visible_BQ > 1, share_BQ, torch.nan).nanmean(dim=-1)
