"""How spread out attention is, and over which tokens.

Axes: B any leading axes (samples, heads), Q queries, K keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures.linear import as_attention, ratio, widened


def row_entropy(weights_BQK: Tensor) -> Tensor:
    """Mean over queries of the entropy of their attention, in nats.

    H = mean over i of -sum_j A_ij log A_ij          (Attention Entropy Collapse, arXiv 2303.06296, Section 3)

    Takes A (..., Q, K) with rows that sum to 1, returns (...): from 0 (each query sees one key) to log K. NaN where
    A holds NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    entropy_BQ: Tensor = torch.special.entr(as_attention(weights_BQK)).sum(dim=-1)
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


def importance(weights_BQK: Tensor) -> Tensor:
    """How much of all attention each token receives.

    a_j = 1/l sum_i A_ij                             (Value Residual Learning, arXiv 2410.17897, before Eq. 11)

    The paper prints the sum over j, which is 1/l for every row; its figures and code take this one, over queries. Takes
    A (..., Q, K), returns (..., K), each from 0 to 1, all together 1. To follow the authors, average A over heads
    first. NaN where A holds NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    return as_attention(weights_BQK).mean(dim=-2)


def importance_entropy(weights_BQK: Tensor) -> Tensor:
    """Entropy of what each token receives of all attention, in nats. Low is concentrated.

    -sum_j a'_j log a'_j, a'_j = a_j / sum_k a_k      (Value Residual Learning, arXiv 2410.17897, Eq. 11)

    The paper's text says that high is concentrated; its figures say low. Takes A (..., Q, K), returns (...), from 0
    (all attend to one token) to log K. Under a causal mask even uniform attention stays below log K: 3.754 of 4.159 for
    64 tokens. NaN where A holds NaN or infinities, or no attention at all. Raises ShapeError for fewer than two axes.
    """
    entropy_B: Tensor = torch.special.entr(_importance_share(weights_BQK)).sum(dim=-1)
    return entropy_B


def first_token_importance(weights_BQK: Tensor) -> Tensor:
    """The share of all attention that goes to the first token, the sink.

    a'_1 = a_1 / sum_k a_k                           (Value Residual Learning, arXiv 2410.17897, Eq. 11 and Figure 2)

    Takes A (..., Q, K), returns (...), from 0 to 1. Uniform causal
    attention of T tokens has (1 + 1/2 + ... + 1/T) / T. With left padding the first token is not the first column.
    NaN where A holds NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    return _importance_share(weights_BQK)[..., 0]


def positions_attended(weights_BQK: Tensor, threshold: float = 1e-5) -> Tensor:
    """To how many tokens a query attends, mean over queries.

    mean over i of #{j : A_ij > threshold}           (Parameter Norm Growth, arXiv 2010.09697, Section 4.3)

    The threshold is that of the authors' code. They count in the saturated network: see `saturated_attention`. Takes A
    (..., Q, K), returns (...), from 0 to K. NaN where A holds NaN or infinities. Raises ShapeError for fewer than two
    axes.
    """
    weights_BQK = as_attention(weights_BQK)
    is_attended_BQK = (weights_BQK > threshold).to(weights_BQK.dtype)
    return torch.where(weights_BQK.isnan(), torch.nan, is_attended_BQK).sum(dim=-1).mean(dim=-1)


def saturated_attention(scores_BTT: Tensor, causal: bool) -> Tensor:
    """Attention in the limit of infinitely large parameters: each query spreads evenly over its highest scores.

    A_ij = [j in argmax_k s_ik] / |argmax_k s_ik|, k <= i if causal      (Parameter Norm Growth, Section 4.2)

    Ties are exact equality. The authors' code multiplies masked scores by 0, so that future tokens may win; here they
    never do. Takes scores (..., T, T), where -inf masks a key; returns the same axes. A row without a finite maximum
    (all masked, or NaN or +inf among the visible) is NaN. Raises ShapeError unless scores are square.
    """
    if scores_BTT.ndim < 2 or scores_BTT.shape[-2] != scores_BTT.shape[-1]:
        raise ShapeError(f"scores need axes (..., tokens, tokens), got {tuple(scores_BTT.shape)}")
    scores_BTT = widened(scores_BTT)
    if causal:
        is_future_TT = torch.ones_like(scores_BTT, dtype=torch.bool).triu(1)
        scores_BTT = scores_BTT.masked_fill(is_future_TT, -torch.inf)
    highest_BT1 = scores_BTT.amax(dim=-1, keepdim=True)
    is_highest_BTT = (scores_BTT == highest_BT1).to(scores_BTT.dtype)
    return torch.where(highest_BT1.isfinite(), is_highest_BTT / is_highest_BTT.sum(dim=-1, keepdim=True), torch.nan)


def _importance_share(weights_BQK: Tensor) -> Tensor:
    importance_BK = importance(weights_BQK)
    return ratio(importance_BK, importance_BK.sum(dim=-1, keepdim=True))
