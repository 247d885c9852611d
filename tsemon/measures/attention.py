"""How spread out attention is, and over which tokens.

Axes: B any leading axes (samples, heads), Q queries, K keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures import rows
from tsemon.measures.linear import as_attention, ratio, widened
from tsemon.measures.sums import known

__all__ = [
    "attention_entropy",
    "attention_entropy_min",
    "attention_entropy_se",
    "first_token_importance",
    "importance",
    "importance_entropy",
    "max_attention_logit",
    "positions_attended",
    "row_entropy",
    "saturated_attention",
    "sink_share",
]


def row_entropy(weights_BQK: Tensor) -> Tensor:
    """Mean over queries of the entropy of their attention, in nats.

    H = mean over i of -sum_j A_ij log A_ij          (Attention Entropy Collapse, arXiv 2303.06296, Section 3)

    Takes A (..., Q, K) with rows that sum to 1, returns (...): from 0 (each query sees one key) to log K. NaN where
    A holds NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    return rows.entropy(_given(weights_BQK)).mean(dim=-1)


def attention_entropy(scores_BQK: Tensor, visible_BQK: Tensor) -> Tensor:
    """Return the entropy of softmax(scores) over the visible keys, relative to the largest that the query can have.

    mean over i of H_i / log v_i, v_i the number of keys that query i sees       (Attention Entropy Collapse, arXiv
    2303.06296, Section 3, divided by its largest value)

    Takes scores and visibility (..., Q, K), returns (...) in [0, 1]: 1 uniform, 0 one-hot. Dividing by log v_i makes the
    early queries of a causal model comparable with its late ones. Queries that see fewer than two keys have no entropy and
    do not count; NaN if none is left, and if a visible score is NaN or infinite. Raises ShapeError if the shapes differ.
    """
    found, _, num_visible_BQ = _softmaxed(scores_BQK, visible_BQK)
    share_BQ = rows.entropy(found) / num_visible_BQ.to(found.total.dtype).log()
    has_choice_BQ = num_visible_BQ > 1
    return torch.where(has_choice_BQ, share_BQ, 0.0).sum(dim=-1) / has_choice_BQ.sum(dim=-1)


def attention_entropy_min(scores_BHQK: Tensor, visible_BHQK: Tensor) -> Tensor:
    """Return the attention entropy of the head that has the lowest.

    min over heads of attention_entropy               (Attention Entropy Collapse, arXiv 2303.06296, Section 3)

    Takes scores and visibility (..., H, Q, K), returns (...) in [0, 1]. Heads without an entropy do not count; NaN if no
    head has one. Raises ShapeError if the shapes differ.
    """
    return rows.lowest(attention_entropy(scores_BHQK, visible_BHQK))


def attention_entropy_se(entropy_BHQ: Tensor, *, num_samples: int, num_rows: int) -> Tensor:
    """Return the standard error of an attention entropy that stands for more rows than those it was computed on.

    sqrt((1 - b/B) s_b^2 / b + b/B (1 - n/N) s_w^2 / n)           (Cochran, Sampling Techniques, Chapter 10)

    s_b^2 is the variance of the samples' means, s_w^2 the variance of the rows of one sample, both of the mean over heads.

    Args:
        entropy_BHQ: Normalized entropies of n = b Q rows of b samples (..., b, H, Q); NaN for rows without an entropy.
        num_samples: Number of samples B that the b samples stand for.
        num_rows: Number of rows of each sample that the Q rows stand for, so that N = b times that.

    Returns (...), >= 0 in float64: 0 if nothing was left out. NaN if no row has an entropy, and for one row of many.
    Raises ShapeError for fewer than three axes.
    """
    if entropy_BHQ.ndim < 3:
        raise ShapeError(f"entropies of rows need axes (..., samples, heads, rows), got {tuple(entropy_BHQ.shape)}")
    samples_share, rows_share = entropy_BHQ.shape[-3] / num_samples, entropy_BHQ.shape[-1] / num_rows
    moments_BM = rows.moments(~entropy_BHQ.isnan(), widened(entropy_BHQ))
    return rows.standard_error(rows.spread(moments_BM, samples_share, rows_share))


def max_attention_logit(scores_BQK: Tensor, visible_BQK: Tensor) -> Tensor:
    """Return the largest attention logit.

    max over i and the keys j that i sees of s_ij = q_i . k_j * scale + bias        (Attention Entropy Collapse, arXiv
    2303.06296, Section 3)

    Takes scores and visibility (..., Q, K), returns (...). Rows with NaN among the visible scores do not count; NaN if no
    row is left. Raises ShapeError if the shapes differ.
    """
    _, highest_BQ, num_visible_BQ = _softmaxed(scores_BQK, visible_BQK)
    counts_BQ = (num_visible_BQ > 0) & ~highest_BQ.isnan()
    return known(torch.where(counts_BQ, highest_BQ, -torch.inf).amax(dim=-1))


def importance(weights_BQK: Tensor) -> Tensor:
    """How much of all attention each token receives.

    a_j = 1/l sum_i A_ij                             (Value Residual Learning, arXiv 2410.17897, before Eq. 11)

    The paper prints the sum over j, which is 1/l for every row; its figures and code take this one, over queries. Takes
    A (..., Q, K), returns (..., K), each from 0 to 1, all together 1. To follow the authors, average A over heads
    first. NaN where A holds NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    weights_BQK = as_attention(weights_BQK)
    return rows.received(weights_BQK, weights_BQK.new_ones(weights_BQK.shape[:-1])) / weights_BQK.shape[-2]


def importance_entropy(weights_BQK: Tensor, *, normalize: bool = False) -> Tensor:
    """Entropy of what each token receives of all attention, in nats. Low is concentrated.

    -sum_j a'_j log a'_j, a'_j = a_j / sum_k a_k      (Value Residual Learning, arXiv 2410.17897, Eq. 11)

    The paper's text says that high is concentrated; its figures say low. Takes A (..., Q, K), returns (...), from 0
    (all attend to one token) to log K. Under a causal mask even uniform attention stays below log K: 3.754 of 4.159 for
    64 tokens. `normalize` divides by log K, as the metric of this name does, which averages A over heads first: from 0 to 1,
    NaN for one key. NaN where A holds NaN or infinities, or no attention at all. Raises ShapeError for fewer than two axes.
    """
    entropy_B = rows.entropy_of_received(importance(weights_BQK))
    return entropy_B / (math.log(weights_BQK.shape[-1]) or torch.nan) if normalize else entropy_B


def first_token_importance(weights_BQK: Tensor) -> Tensor:
    """The fraction of all attention that goes to the first token, the sink.

    a'_1 = a_1 / sum_k a_k                           (Value Residual Learning, arXiv 2410.17897, Eq. 11 and Figure 2)

    Takes A (..., Q, K), returns (...), from 0 to 1. Uniform causal
    attention of T tokens has (1 + 1/2 + ... + 1/T) / T. With left padding the first token is not the first column.
    NaN where A holds NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    importance_BK = importance(weights_BQK)
    return ratio(importance_BK[..., 0], importance_BK.sum(dim=-1))


def sink_share(weights_BQK: Tensor) -> Tensor:
    """Return the fraction of attention that later queries give to the first token.

    mean over i > 1 of A_i1                          (Value Residual Learning, arXiv 2410.17897, Figure 2)

    Takes A (..., Q, K) with rows that sum to 1, returns (...), from 0 to 1. The first token's own row does not count: under
    a causal mask it is 1. Uniform attention has 1/K, uniform causal attention of T tokens (1/2 + ... + 1/T) / (T - 1). NaN
    for one query, and where A holds NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    return as_attention(weights_BQK)[..., 1:, 0].mean(dim=-1)


def positions_attended(weights_BQK: Tensor, threshold: float = rows.ATTENDED) -> Tensor:
    """To how many tokens a query attends, mean over queries.

    mean over i of #{j : A_ij > threshold}           (Parameter Norm Growth, arXiv 2010.09697, Section 4.3)

    The threshold is from the authors' code. They count in the saturated network: see `saturated_attention`. Takes A
    (..., Q, K), returns (...), from 0 to K. NaN where A holds NaN or infinities. Raises ShapeError for fewer than two
    axes.
    """
    return rows.num_attended(_given(weights_BQK), threshold).mean(dim=-1)


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


def _given(weights_BQK: Tensor) -> rows.Weights:
    weights_BQK = as_attention(weights_BQK)
    relative_BQK = torch.where(weights_BQK == 0, 0.0, weights_BQK.log())  # 0 log 0 adds nothing
    total_BQ = torch.where(weights_BQK[..., 0].isnan(), torch.nan, 1.0)
    return rows.Weights(weights_BQK, relative_BQK, total_BQ)


def _softmaxed(scores_BQK: Tensor, visible_BQK: Tensor) -> tuple[rows.Weights, Tensor, Tensor]:
    """The weights, and for each query its largest score and how many keys it sees."""
    if scores_BQK.shape != visible_BQK.shape or scores_BQK.ndim < 2:
        raise ShapeError(
            f"scores and visible need the same axes (..., queries, keys), got {tuple(scores_BQK.shape)} and "
            f"{tuple(visible_BQK.shape)}"
        )
    return *rows.softmaxed(widened(scores_BQK), visible_BQK), visible_BQK.sum(dim=-1)
