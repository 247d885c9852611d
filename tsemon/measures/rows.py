"""Weigh attention row by row: which query rows, and what their sums are, in chunks that never hold a T x T matrix.

Axes: B samples, H heads, T queries, R of them, S keys.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tsemon.measures.scores import Scores, Size

Rows = int | Literal["all"]
"""How many query rows per head are weighed at the most; "all" of all sequences."""

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
    """Of all sequences."""
    rows_share: float
    """Of all rows of a sequence."""


def choose(size: Size, at_most: Rows, device: torch.device) -> Chosen:
    """The first sequences, and of each one row from the middle of each of equally long stretches."""
    batch, heads, queries, keys = size
    if at_most == "all":
        return Chosen(batch, torch.arange(queries, device=device), 1.0, 1.0)
    num_rows = min(queries, at_most)
    num_samples = min(batch, max(1, WEIGHTS_PER_ROW * at_most // (heads * keys * num_rows)))
    rows = (torch.arange(num_rows, device=device) * 2 + 1) * queries // (2 * num_rows)
    return Chosen(num_samples, rows, num_samples / batch, num_rows / queries)


class Sums(NamedTuple):
    """Sums over the rows of each sample. A row counts if its query is a token and may see a key."""

    rows_BH: Tensor
    attended_BH: Tensor
    others_BH: Tensor
    """Rows that are not the first token's own."""
    sink_BH: Tensor
    """What the first token gets from them."""
    choices_BH: Tensor
    """Rows that may see two keys or more: only these have an entropy."""
    entropy_BH: Tensor
    """As a share of the largest that the row can have."""
    received_BS: Tensor
    """What each key gets, summed over heads, too."""
    moments_BM: Tensor
    """Of the rows' entropies, mean over heads: number, sum and sum of squares, in float64 as they are subtracted."""
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
    # exp(s - max) / total are the weights. They are not divided out: each pass over them costs as much as the scores.
    relative_BHRS = torch.where(visible_BHRS, scores_BHRS, NEVER)
    highest_BHR1 = relative_BHRS.amax(dim=-1, keepdim=True)
    relative_BHRS = relative_BHRS.sub_(highest_BHR1)
    weights_BHRS = (relative_BHRS * LOG2_E).exp2_()  # on a CPU exp takes ten times as long where it underflows
    total_BHR = weights_BHRS.sum(dim=-1)
    entropy_BHR = total_BHR.log() - relative_BHRS.mul_(weights_BHRS).sum(dim=-1) / total_BHR
    share_BHR = entropy_BHR / num_visible_BHR.to(entropy_BHR.dtype).log()
    has_choice_BHR = counts_BHR & (num_visible_BHR > 1)

    sink_BHR = torch.take_along_dim(weights_BHRS, first_B[:, None, None, None], dim=-1).squeeze(-1) / total_BHR
    is_other_BHR = counts_BHR & (rows != first_B[:, None])[:, None]
    attended_BHR = (weights_BHRS - ATTENDED * total_BHR[..., None]).gt_(0).sum(dim=-1)
    factor_BHR = torch.where(counts_BHR, 1 / total_BHR, 0.0)
    received_BS = (factor_BHR.flatten(1).unsqueeze(1) @ weights_BHRS.flatten(1, 2)).squeeze(1)
    highest_BHR = highest_BHR1.squeeze(-1)
    highest_BHR = torch.where(counts_BHR & ~highest_BHR.isnan(), highest_BHR, -torch.inf)
    return Sums(
        rows_BH=_sum(counts_BHR, 1.0),
        attended_BH=_sum(counts_BHR, attended_BHR + 0 * total_BHR),
        others_BH=_sum(is_other_BHR, 1.0),
        sink_BH=_sum(is_other_BHR, sink_BHR),
        choices_BH=_sum(has_choice_BHR, 1.0),
        entropy_BH=_sum(has_choice_BHR, share_BHR),
        received_BS=received_BS,
        moments_BM=_moments(has_choice_BHR, share_BHR),
        highest_BH=highest_BHR.amax(dim=-1),
    )


def _sum(counts_BHR: Tensor, value: Tensor | float) -> Tensor:
    return torch.where(counts_BHR, value, 0.0).sum(dim=-1)


def _moments(counts_BHR: Tensor, share_BHR: Tensor) -> Tensor:
    num_heads_BR = counts_BHR.sum(dim=1)
    mean_BR = torch.where(counts_BHR, share_BHR.double(), 0.0).sum(dim=1) / num_heads_BR
    mean_BR = torch.where(num_heads_BR > 0, mean_BR, 0.0)
    return torch.stack([(num_heads_BR > 0).sum(dim=-1).double(), mean_BR.sum(dim=-1), mean_BR.square().sum(dim=-1)], -1)
