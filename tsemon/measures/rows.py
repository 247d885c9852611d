"""Weigh attention row by row: which query rows, and what their sums are, in chunks that never hold a T x T matrix.

Axes: B samples, H heads, T queries, R of them, S keys, M moments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tsemon.measures.scores import Scores, Size
from tsemon.measures.sums import Partial, Partials, counted, known, mean

Rows = int | Literal["all"]
"""Maximum number of query rows per head that attention is computed on; "all" means all rows of all sequences."""

MAX_ROWS = 64
"""By default. 32 of 1,024 rows miss a head's entropy by 0.004 (sd)."""
WEIGHTS_PER_ROW = 2**12
"""Times the rows, the attention weights that are computed per layer, as long as this leaves a sequence."""
CHUNK_WEIGHTS = 2**20
"""Attention weights in memory at a time; a single row of all heads may be more."""
ATTENDED = 1e-5
"""A key that gets more is attended to: the threshold of the authors' code (Parameter Norm Growth, Section 4.3)."""
NEVER = -1e30
"""Score of a key that may not be seen. Not -inf: times its weight, zero, it adds nothing to the entropy."""


LOG2_E = math.log2(math.e)


class Chosen(NamedTuple):
    """Which part of an attention stands for the whole."""

    num_samples: int
    rows: Tensor
    samples_share: float
    """Fraction of all sequences."""
    rows_share: float
    """Fraction of all rows of a sequence."""


def choose(size: Size, at_most: Rows, device: torch.device) -> Chosen:
    """The first sequences, and of each one row from the middle of each of equally long stretches."""
    batch, heads, queries, keys = size
    if at_most == "all":
        return Chosen(batch, torch.arange(queries, device=device), 1.0, 1.0)
    num_rows = min(queries, at_most)
    num_samples = min(batch, max(1, WEIGHTS_PER_ROW * at_most // (heads * keys * num_rows)))
    rows = (torch.arange(num_rows, device=device) * 2 + 1) * queries // (2 * num_rows)
    return Chosen(num_samples, rows, num_samples / batch, num_rows / queries)


class Weights(NamedTuple):
    """Attention of some rows, not normalized: `weights / total`. To divide costs as much as to compute the scores."""

    weights: Tensor
    relative: Tensor
    """Logarithms of the weights; finite where a weight is 0."""
    total: Tensor
    """Sum of the weights of each row."""


def softmaxed(scores: Tensor, visible: Tensor) -> tuple[Weights, Tensor]:
    """Weights exp(s - max s) of the visible keys, and the largest score of each row."""
    relative = torch.where(visible, scores, NEVER)
    highest = relative.amax(dim=-1, keepdim=True)
    relative = relative.sub_(highest)
    weights = (relative * LOG2_E).exp2_()  # on a CPU exp takes ten times as long where it underflows
    return Weights(weights, relative, weights.sum(dim=-1)), highest.squeeze(-1)


def entropy(of: Weights) -> Tensor:
    """Entropy of each row in nats. Uses `of.relative` up."""
    return of.total.log() - of.relative.mul_(of.weights).sum(dim=-1) / of.total


def num_attended(of: Weights, threshold: float = ATTENDED) -> Tensor:
    """Number of keys of each row that get more than `threshold`."""
    return (of.weights - threshold * of.total[..., None]).gt_(0).sum(dim=-1) + 0 * of.total  # NaN stays


def received(weights: Tensor, factor: Tensor) -> Tensor:
    """Sum over rows (..., S) of the weights (..., R, S), each row times its factor (..., R)."""
    return (factor.unsqueeze(-2) @ weights).squeeze(-2)


def entropy_of_received(received_BS: Tensor) -> Tensor:
    """Entropy in nats of the shares that keys get of all attention; NaN if there was none."""
    share_BS = received_BS / received_BS.sum(dim=-1, keepdim=True)
    found: Tensor = torch.special.entr(share_BS).sum(dim=-1)
    return found


class Sums(NamedTuple):
    """Sums over the rows of each sample. A row counts if its query is a token and may see a key."""

    rows_BH: Tensor
    attended_BH: Tensor
    others_BH: Tensor
    """Rows that are not the first token's own."""
    sink_BH: Tensor
    """Attention that the first token gets from these rows."""
    choices_BH: Tensor
    """Rows that may see two keys or more: only these have an entropy."""
    entropy_BH: Tensor
    """Entropy divided by the largest entropy that the row can have."""
    received_BS: Tensor
    """Attention that each key gets, also summed over heads."""
    moments_BM: Tensor
    """Number, sum and sum of squares of the rows' entropies, each a mean over heads, in float64 as they are subtracted."""
    highest_BH: Tensor
    """The largest score: no sum."""


def weigh(scores: Scores, chosen: Chosen, valid_BT: Tensor, first_B: Tensor) -> Sums:
    """`valid_BT`: which queries are tokens. `first_B`: where the first token of each sample is."""
    rows_per_chunk = max(1, CHUNK_WEIGHTS // (scores.size.heads * scores.size.keys))
    samples_per_chunk = max(1, rows_per_chunk // len(chosen.rows))
    parts = []
    for start in range(0, chosen.num_samples, samples_per_chunk):
        samples = slice(start, min(start + samples_per_chunk, chosen.num_samples))
        some, valid, first = scores.of(samples), valid_BT[samples], first_B[samples]
        chunks = (_weigh(some, rows, valid, first) for rows in torch.split(chosen.rows, rows_per_chunk))
        parts.append(functools.reduce(_added, chunks))
    return Sums(*(torch.cat(of_chunks) for of_chunks in zip(*parts, strict=True)))


def _added(a: Sums, b: Sums) -> Sums:
    summed = Sums(*(x + y for x, y in zip(a, b, strict=True)))
    return summed._replace(highest_BH=torch.maximum(a.highest_BH, b.highest_BH))


def _weigh(scores: Scores, rows: Tensor, valid_BT: Tensor, first_B: Tensor) -> Sums:
    scores_BHRS, visible_BHRS = scores.at(rows)
    num_visible_BHR = visible_BHRS.sum(dim=-1)
    counts_BHR = (num_visible_BHR > 0) & valid_BT.index_select(1, rows)[:, None]
    counts_BHR = counts_BHR.expand(scores_BHRS.shape[:-1])
    found, highest_BHR = softmaxed(scores_BHRS, visible_BHRS)
    share_BHR = entropy(found) / num_visible_BHR.to(found.total.dtype).log()
    has_choice_BHR = counts_BHR & (num_visible_BHR > 1)

    sink_BHR = torch.take_along_dim(found.weights, first_B[:, None, None, None], dim=-1).squeeze(-1) / found.total
    is_other_BHR = counts_BHR & (rows != first_B[:, None])[:, None]
    factor_BHR = torch.where(counts_BHR, 1 / found.total, 0.0)
    highest_BHR = torch.where(counts_BHR & ~highest_BHR.isnan(), highest_BHR, -torch.inf)
    return Sums(
        rows_BH=_sum(counts_BHR, 1.0),
        attended_BH=_sum(counts_BHR, num_attended(found)),
        others_BH=_sum(is_other_BHR, 1.0),
        sink_BH=_sum(is_other_BHR, sink_BHR),
        choices_BH=_sum(has_choice_BHR, 1.0),
        entropy_BH=_sum(has_choice_BHR, share_BHR),
        received_BS=received(found.weights.flatten(1, 2), factor_BHR.flatten(1)),
        moments_BM=moments(has_choice_BHR, share_BHR),
        highest_BH=highest_BHR.amax(dim=-1),
    )


def _sum(counts_BHR: Tensor, value: Tensor | float) -> Tensor:
    return torch.where(counts_BHR, value, 0.0).sum(dim=-1)


PER_HEAD = ("attention_entropy", "sink_share", "positions_attended")
SPREAD = "spread"
"""Name of the sums that `spread` returns and `standard_error` needs."""


def row_sums(sums: Sums, num_keys_B: Tensor, chosen: Chosen) -> Partials:
    """Sums over samples of each sample's mean over rows. `num_keys_B`: how many keys each sample has."""
    largest_B = num_keys_B[: chosen.num_samples].to(sums.received_BS.dtype).log()
    return {
        **counted("attention_entropy", sums.entropy_BH / sums.choices_BH, dim=0),
        **counted("sink_share", sums.sink_BH / sums.others_BH, dim=0),
        **counted("positions_attended", sums.attended_BH / sums.rows_BH, dim=0),
        **counted("importance_entropy", entropy_of_received(sums.received_BS) / largest_B, dim=0),
        "max_attention_logit": Partial(sums.highest_BH.amax(dim=0), "max"),
        SPREAD: Partial(spread(sums.moments_BM, chosen.samples_share, chosen.rows_share)),
    }


def row_metrics(sums: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Finish `row_sums`, merged over all parts and with any leading axes: metrics, and metrics per head."""
    heads = {name: mean(sums, name) for name in PER_HEAD} | {"max_attention_logit": known(sums["max_attention_logit"])}
    found = {name: value_H.nanmean(dim=-1) for name, value_H in heads.items()}
    found["max_attention_logit"] = known(sums["max_attention_logit"].amax(dim=-1))
    found["attention_entropy_min"] = lowest(heads["attention_entropy"])
    found["attention_entropy_se"] = standard_error(sums[SPREAD])
    found["importance_entropy"] = mean(sums, "importance_entropy")
    return found, heads


def lowest(values_H: Tensor) -> Tensor:
    """The lowest value along the last axis; NaN does not count, and is the result if all are NaN."""
    return known(torch.where(values_H.isnan(), torch.inf, values_H).amin(dim=-1))


def moments(counts_BHR: Tensor, share_BHR: Tensor) -> Tensor:
    """Number, sum and sum of squares of the rows' means over heads, (..., B, 3) in float64, as they are subtracted."""
    num_heads_BR = counts_BHR.sum(dim=-2)
    mean_BR = torch.where(counts_BHR, share_BHR.double(), 0.0).sum(dim=-2) / num_heads_BR
    mean_BR = torch.where(num_heads_BR > 0, mean_BR, 0.0)
    return torch.stack([(num_heads_BR > 0).sum(dim=-1).double(), mean_BR.sum(dim=-1), mean_BR.square().sum(dim=-1)], -1)


def spread(moments_BM: Tensor, samples_share: float, rows_share: float) -> Tensor:
    """Sums over samples: samples, all samples, rows, all rows of these samples; the means, their squares, and the squared
    distances of rows from their sample's mean."""
    num_B, sum_B, squares_B = moments_BM.unbind(dim=-1)
    mean_B = sum_B / num_B
    within_B = (squares_B - sum_B * mean_B).clamp_min(0)
    one_B = torch.ones_like(num_B)
    each_B = [one_B, one_B / samples_share, num_B, num_B / rows_share, mean_B, mean_B.square(), within_B]
    return torch.where(mean_B.isfinite().unsqueeze(-2), torch.stack(each_B, dim=-2), 0.0).sum(dim=-1)


def standard_error(spread_LM: Tensor) -> Tensor:
    """Standard error of a mean over some rows of some samples: both choices contribute.

    se^2 = (1 - b/B) s_b^2 / b + b/B (1 - n/N) s_w^2 / n     (two-stage sampling: Cochran, Sampling Techniques, Ch. 10)

    for b of B samples, n of their N rows, s_b^2 the variance of samples' means and s_w^2 that of rows within a sample.
    If only one sample of many is known, s_b is not: then samples are taken to differ as means of their rows do.
    """
    b_L, all_samples_L, n_L, all_rows_L, mean_L, squares_L, within_L = spread_LM.unbind(dim=-1)
    of_rows_L = within_L / (n_L - b_L) / n_L
    of_samples_L = (squares_L - mean_L.square() / b_L).clamp_min(0) / (b_L - 1) / b_L
    of_samples_L = torch.where(b_L > 1, of_samples_L, of_rows_L)
    is_part_L, share_L = b_L < all_samples_L, b_L / all_samples_L
    squared_L = torch.where(is_part_L, (1 - share_L) * of_samples_L, 0.0)
    squared_L = squared_L + torch.where(n_L < all_rows_L, share_L * (1 - n_L / all_rows_L) * of_rows_L, 0.0)
    return torch.where(b_L > 0, squared_L.sqrt(), torch.nan)
