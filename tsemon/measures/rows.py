"""Weigh attention row by row: which query rows, and what their sums are, in chunks that never hold a T x T matrix.

Axes: B samples, H heads, T queries, R of them, S keys, M moments, V values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tsemon.measures.scores import Scores, Size
from tsemon.measures.sequences import ROWS, Sequences, first_own_key
from tsemon.measures.sums import Partial, Partials, counted, known, mean

Rows = int | Literal["all"]
"""Maximum number of query rows per head that attention is computed on; "all" means all rows of all sequences."""

MAX_ROWS = 64
"""By default. 32 of 1,024 rows miss a head's entropy by 0.004 (sd)."""
WEIGHTS_PER_ROW = 2**12
"""Times the rows, the attention weights that are computed per layer, as long as this leaves a sequence."""
SEQUENCES = 4
"""Maximum number of sequences with the full number of rows. There may be more of shorter ones."""
CHUNK_WEIGHTS = 2**20
"""Attention weights in memory at a time; a single row of all heads may be more."""
LAUNCHED = 16
"""Times these, the scores of which an accelerator takes the maximum at a time: small chunks cost it a launch each."""
FEWEST_ROWS = 8
"""Minimum number of rows of a document, unless it has fewer. Fewer rows do not show how much attention its keys receive."""
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
    at_most_rows = min(WEIGHTS_PER_ROW * at_most // (heads * keys), SEQUENCES * max(at_most, MAX_ROWS))
    num_samples = min(batch, max(1, at_most_rows // num_rows))
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
    """Sums over the rows of each sequence. A row counts if its query is a token and may see a key.

    If a row of the batch holds several documents, sums over rows have one entry per document instead of per row.
    """

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
    """The largest score of these rows: no sum. If they are not all rows, `highest` has the maximum."""


PER_SEQUENCE = {"rows_BH", "attended_BH", "others_BH", "sink_BH", "choices_BH", "entropy_BH"}
"""Sums with an entry for each document, if there are documents."""


class _Tokens(NamedTuple):
    """The rows of attention as queries."""

    valid_BT: Tensor
    first_BT: Tensor
    """Position of the first token of the query's own sequence."""
    documents_BT: Tensor
    """-1 for all if each row is a sequence."""
    num_places: int
    """0 if each row is a sequence."""

    @classmethod
    def of(cls, scores: Scores, sequences: Sequences) -> _Tokens:
        shape = scores.size.batch, scores.size.queries
        valid_BT, first_BT, documents_BT = sequences.valid_BT, sequences.firsts(), sequences.documents_BT
        if first_BT is not None and documents_BT is not None:
            first_BT = first_BT + (first_own_key(scores) or 0)
        return cls(
            torch.ones(shape, dtype=torch.bool, device=scores.device) if valid_BT is None else valid_BT.bool(),
            torch.zeros(shape, dtype=torch.int64, device=scores.device) if first_BT is None else first_BT,
            torch.full(shape, -1, device=scores.device) if documents_BT is None else documents_BT,
            0 if documents_BT is None else sequences.num_places,
        )

    def at(self, samples: slice, rows: Tensor) -> _Tokens:
        valid_BT, first_BT, documents_BT = (x_BT[samples].index_select(1, rows) for x_BT in self[:3])
        return _Tokens(valid_BT, first_BT, documents_BT, self.num_places)

    def sums(self, counts: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
        """Sums over rows of each of the values (B, H, R) that count, (B, H) or (S, H)."""
        value_VBHR = torch.where(torch.stack(list(counts)), torch.stack(list(values)), 0.0)
        if not self.num_places:
            return list(value_VBHR.sum(dim=-1).unbind())
        value_VNH = value_VBHR.transpose(2, 3).flatten(1, 2)
        index_N = torch.where(self.documents_BT >= 0, self.documents_BT, self.num_places).flatten()
        shape = len(value_VNH), self.num_places + 1, value_VNH.shape[-1]
        return list(value_VNH.new_zeros(shape).index_add_(1, index_N, value_VNH)[:, :-1].unbind())


def weigh(scores: Scores, chosen: Chosen, sequences: Sequences = ROWS) -> Sums:
    """Read the chosen rows."""
    rows_per_chunk = max(1, CHUNK_WEIGHTS // (scores.size.heads * scores.size.keys))
    samples_per_chunk = max(1, rows_per_chunk // len(chosen.rows))
    tokens = _Tokens.of(scores, sequences)
    parts = []
    for start in range(0, chosen.num_samples, samples_per_chunk):
        samples = slice(start, min(start + samples_per_chunk, chosen.num_samples))
        some = scores.of(samples)
        split = torch.split(chosen.rows, rows_per_chunk)
        parts.append(functools.reduce(_added, (_weigh(some, rows, tokens.at(samples, rows)) for rows in split)))
    joined = parts[0] if len(parts) == 1 else Sums(*map(torch.cat, zip(*parts, strict=True)))
    if not tokens.num_places:
        return joined
    return joined._replace(**{name: sum(getattr(part, name) for part in parts) for name in PER_SEQUENCE})


def highest(scores: Scores, num_samples: int, valid_BT: Tensor) -> Tensor:
    """Return the largest score (B, H) that a query of the first samples gives to a key that it may see, over all rows.

    -inf if there is none. `valid_BT`: which queries are tokens. Rows with a NaN do not count.
    """
    _, heads, queries, keys = scores.size
    chunk = CHUNK_WEIGHTS * (1 if scores.device.type == "cpu" else LAUNCHED)
    rows_per_chunk = max(1, chunk // (heads * keys))
    samples_per_chunk = max(1, rows_per_chunk // queries)
    parts = []
    for first in range(0, num_samples, samples_per_chunk):
        samples = slice(first, min(first + samples_per_chunk, num_samples))
        some, found_BHC = scores.of(samples), []
        # The last rows first: they see the most keys if causal, so each chunk fits into the memory of the one before.
        for start in reversed(range(0, queries, rows_per_chunk)):
            stop = min(start + rows_per_chunk, queries)
            rows = torch.arange(start, stop, device=scores.device)
            scores_BHRS, visible_BHRS = some.at(rows, min(stop, keys) if some.is_causal else None)
            highest_BHR = torch.where(visible_BHRS, scores_BHRS, -torch.inf).amax(dim=-1)
            counts_BHR = valid_BT[samples, None, start:stop] & ~highest_BHR.isnan()
            found_BHC.append(torch.where(counts_BHR, highest_BHR, -torch.inf).amax(dim=-1))
        parts.append(torch.stack(found_BHC).amax(dim=0))
    return torch.cat(parts)


def _added(a: Sums, b: Sums) -> Sums:
    summed = Sums(*(x + y for x, y in zip(a, b, strict=True)))
    return summed._replace(highest_BH=torch.maximum(a.highest_BH, b.highest_BH))


def _weigh(scores: Scores, rows: Tensor, of_rows: _Tokens) -> Sums:
    scores_BHRS, visible_BHRS = scores.at(rows)
    num_visible_BHR = visible_BHRS.sum(dim=-1)
    counts_BHR = (num_visible_BHR > 0) & of_rows.valid_BT[:, None]
    counts_BHR = counts_BHR.expand(scores_BHRS.shape[:-1])
    found, highest_BHR = softmaxed(scores_BHRS, visible_BHRS)
    share_BHR = entropy(found) / num_visible_BHR.to(found.total.dtype).log()
    has_choice_BHR = counts_BHR & (num_visible_BHR > 1)

    first_BR = of_rows.first_BT
    sink_BHR = torch.take_along_dim(found.weights, first_BR[:, None, :, None], dim=-1).squeeze(-1) / found.total
    is_other_BHR = counts_BHR & (rows != first_BR)[:, None]
    factor_BHR = torch.where(counts_BHR, 1 / found.total, 0.0)
    highest_BHR = torch.where(counts_BHR & ~highest_BHR.isnan(), highest_BHR, -torch.inf)
    one_BHR = torch.ones_like(share_BHR)
    counts = [counts_BHR, counts_BHR, is_other_BHR, is_other_BHR, has_choice_BHR, has_choice_BHR]
    values = [one_BHR, num_attended(found), one_BHR, sink_BHR, one_BHR, share_BHR]
    rows_BH, attended_BH, others_BH, sink_BH, choices_BH, entropy_BH = of_rows.sums(counts, values)
    return Sums(
        rows_BH=rows_BH,
        attended_BH=attended_BH,
        others_BH=others_BH,
        sink_BH=sink_BH,
        choices_BH=choices_BH,
        entropy_BH=entropy_BH,
        received_BS=received(found.weights.flatten(1, 2), factor_BHR.flatten(1)),
        moments_BM=moments(has_choice_BHR, share_BHR),
        highest_BH=highest_BHR.amax(dim=-1),
    )


PER_HEAD = ("attention_entropy", "sink_share", "positions_attended")
SPREAD = "spread"
"""Name of the sums that `spread` returns and `standard_error` needs."""


def row_sums(sums: Sums, chosen: Chosen, num_keys: int, sequences: Sequences = ROWS) -> Partials:
    """Sums over sequences of each one's mean over rows, for sums with any leading axes.

    `num_keys`: of a row, those of a prefix included.
    """
    return {
        **counted("attention_entropy", sums.entropy_BH / sums.choices_BH, dim=-2),
        **counted("sink_share", sums.sink_BH / sums.others_BH, dim=-2),
        **counted("positions_attended", sums.attended_BH / sums.rows_BH, dim=-2),
        **counted("importance_entropy", _importance_entropy(sums, chosen, num_keys, sequences)),
        "max_attention_logit": Partial(sums.highest_BH.amax(dim=-2), "max"),
        SPREAD: Partial(spread(sums.moments_BM, chosen.samples_share, chosen.rows_share)),
    }


def _importance_entropy(sums: Sums, chosen: Chosen, num_keys: int, sequences: Sequences) -> Tensor:
    received_BS, valid_BT = sums.received_BS, sequences.valid_BT
    if sequences.documents_BT is not None:
        return _of_documents(sums, chosen, sequences)
    if valid_BT is None:
        largest_B = received_BS.new_full(received_BS.shape[:-1], num_keys).log()
    else:
        num_B = valid_BT[: chosen.num_samples].sum(dim=-1)
        prefix = num_keys - valid_BT.shape[-1]
        largest_B = torch.where(num_B > 0, num_B + prefix, num_keys).to(received_BS.dtype).log()
    return entropy_of_received(received_BS) / largest_B


def _of_documents(sums: Sums, chosen: Chosen, sequences: Sequences) -> Tensor:
    """The same of each document. Few rows of a document say little of all of them: it does not count."""
    assert sequences.documents_BT is not None
    places = sequences.num_places
    documents_N = sequences.documents_BT[: chosen.num_samples].flatten()
    index_N = torch.where(documents_N >= 0, documents_N, places)
    received_N = sums.received_BS[..., -sequences.documents_BT.shape[1] :].flatten(-2)  # without a memory in front

    def summed(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(*values_N.shape[:-1], places + 1).index_add_(-1, index_N, values_N)

    total_S, size_S = summed(received_N), summed(torch.ones_like(received_N))
    entropy_S = summed(torch.special.entr(received_N / total_S[..., index_N])) / size_S.log()
    read_S = sums.rows_BH.amax(dim=-1)
    is_known_S = (read_S >= FEWEST_ROWS) | (read_S >= size_S[..., :-1])
    return torch.where(is_known_S & (read_S > 0), entropy_S[..., :-1], torch.nan)


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
