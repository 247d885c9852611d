"""All metrics of one hidden state from one pass: sums over its samples, and their finish.

Axes: B samples, T tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures.spectra import batch_gram, effective_ranks
from tsemon.measures.sums import COUNT, Partial, Partials, counted, known, mean, values_of
from tsemon.measures.tokens import TokenStatistics, deescalate, token_similarity, token_statistics

__all__ = [
    "batch_rank",
    "batch_similarity",
    "centred_token_similarity",
    "deescalated_token_similarity",
    "first_hidden_norm_ratio",
    "global_diversity",
    "hidden_max",
    "hidden_rms",
    "nonfinite",
]

MEANS = (
    "token_similarity",
    "token_diversity",
    "centred_token_similarity",
    "cosine_similarity",
    "hfc_lfc",
    "first_hidden_norm_ratio",
    "batch_similarity",
    "nonfinite",
)
"""Means over samples; `batch_similarity` is a mean over parts, each with a batch of its own."""
ENERGY = "energy"
"""Sum of squares over tokens and width."""
OWN_ENERGY = "own_energy"
"""The part of it around the mean token of the batch. Each part has a batch of its own."""


class Batch(NamedTuple):
    """Samples in units of the largest one's unit, so that no square overflows; zeros for samples that do not count."""

    counts_B: Tensor
    """Which samples are finite and not all padding."""
    count_B: Tensor
    """Number of tokens."""
    unit: Tensor
    relative_B: Tensor
    """Unit of each sample relative to the unit of the batch."""
    mean_BD: Tensor

    @classmethod
    def of(cls, stats: TokenStatistics) -> Batch:
        counts_B = stats.largest.isfinite() & (stats.count > 0)
        unit = torch.where(counts_B, stats.unit, 0.0).amax(dim=-1)
        relative_B = torch.where(counts_B, stats.unit / torch.where(unit > 0, unit, 1.0)[..., None], 0.0)
        return cls(
            counts_B=counts_B,
            count_B=torch.where(counts_B, stats.count, 0.0),
            unit=unit,
            relative_B=relative_B,
            mean_BD=torch.where(counts_B[..., None], stats.mean_token, 0.0) * relative_B[..., None],
        )


def state_sums(stats: TokenStatistics, batch: Batch, width: int) -> Partials:
    """Sums over samples of each sample's ratio. Samples that are not finite, or all padding, do not count."""
    counts_B, count_B = batch.counts_B, batch.count_B
    own_B = torch.where(counts_B, stats.own * batch.relative_B, 0.0).square()
    energy = (torch.where(counts_B, stats.shared * batch.relative_B, 0.0).square() + own_B).sum(dim=-1)
    common_D = (batch.mean_BD * count_B[..., None]).sum(dim=-2) / count_B.sum(dim=-1)[..., None]
    centred_B = count_B * (batch.mean_BD - common_D.unsqueeze(-2)).square().sum(dim=-1)
    own_energy = torch.where(counts_B, centred_B + own_B, 0.0).sum(dim=-1)
    # One sample is its own mean: nothing is left of it to be shared.
    has_others_B = counts_B & (counts_B.sum(dim=-1, keepdim=True) > 1)
    centred_B = torch.where(has_others_B, centred_B / (centred_B + own_B), torch.nan)
    squared = batch.unit.double().square()  # the square of 1e20 is no float32
    return {
        **counted("token_similarity", stats.similarity),
        **counted("token_diversity", stats.diversity),
        **counted("centred_token_similarity", centred_B),
        **counted("cosine_similarity", stats.cosine),
        **counted("hfc_lfc", stats.hfc_lfc),
        **counted("first_hidden_norm_ratio", stats.first_ratio),
        **counted("batch_similarity", _batch_similarity(batch)[..., None]),
        **counted("nonfinite", torch.where(stats.count > 0, 1 - stats.largest.isfinite().float(), torch.nan)),
        "hidden_max": Partial(torch.where(counts_B, stats.largest, -math.inf).amax(dim=-1), "max"),
        OWN_ENERGY: Partial(squared * own_energy),
        ENERGY: Partial(squared * energy),
        ENERGY + COUNT: Partial(count_B.sum(dim=-1).double() * width),
    }


def state_metrics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Finish `state_sums`, merged over all parts."""
    found = {name: mean(sums, name) for name in MEANS if name in sums}
    if ENERGY in sums:
        found["global_diversity"] = sums[OWN_ENERGY] / sums[ENERGY]
        found["hidden_rms"] = mean(sums, ENERGY).sqrt()
        found["hidden_max"] = known(sums["hidden_max"])
    return found


def _batch_similarity(batch: Batch) -> Tensor:
    """Token similarity of the matrix of mean tokens; NaN for fewer than two samples."""
    count = batch.counts_B.sum(dim=-1)
    mean_D = batch.mean_BD.sum(dim=-2) / count[..., None]
    own_BD = torch.where(batch.counts_B[..., None], batch.mean_BD - mean_D.unsqueeze(-2), 0.0)
    shared = count * mean_D.square().sum(dim=-1)
    return torch.where(count > 1, shared / (shared + own_BD.square().sum(dim=(-2, -1))), torch.nan)


# One function for each metric of a whole batch. All take X (..., B, T, D) and optionally which tokens count (..., B, T).


def centred_token_similarity(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Token similarity after removal of the mean token of the whole batch: a harmless shared direction does not count.

    mean over samples of |P (X_b - c)|^2 / |X_b - c|^2, P = 11'/T, c the mean over all tokens of all samples   (tsemon)

    Takes X (..., B, T, D), returns (...), from 0 to 1. NaN for one sample, which is its own mean; samples that are not
    finite, or all padding, do not count. Raises ShapeError for fewer than three axes.
    """
    return _of_batch("centred_token_similarity", x_BTD, valid_BT)


def global_diversity(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Fraction of the energy of a batch that is not in its mean token.

    sum of |x - c|^2 / sum of |x|^2 over all tokens of all samples, c their mean          (tsemon)

    Takes X (..., B, T, D), returns (...) in float64, from 0 (all tokens of all samples are equal) to 1. NaN if all are
    zero; samples that are not finite do not count. Raises ShapeError for fewer than three axes.
    """
    return _of_batch("global_diversity", x_BTD, valid_BT)


def batch_similarity(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Fraction of the energy of the samples' mean tokens that the samples have in common.

    token_similarity of the (B, D) matrix of mean tokens                                   (tsemon)

    Takes X (..., B, T, D), returns (...), from 0 to 1. NaN for fewer than two samples that are finite and not all padding.
    Raises ShapeError for fewer than three axes.
    """
    return _of_batch("batch_similarity", x_BTD, valid_BT)


def batch_rank(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Number of directions that the samples use: effective rank of their mean tokens around the mean of these.

    exp(-sum_i p_i log p_i), p_i = sigma_i / sum_j sigma_j, sigma of the rows m_b - mean m        (tsemon)

    Takes X (B, T, D), returns a scalar, from 1 to min(B - 1, D); of more than 256 samples 256, evenly spread. From a
    float64 Gram matrix, within 2e-4. NaN if all samples have the same mean token. Raises ShapeError unless X has three axes.
    """
    if x_BTD.ndim != 3:
        raise ShapeError(f"a batch of token matrices needs axes (samples, tokens, width), got {tuple(x_BTD.shape)}")
    batch = Batch.of(token_statistics(x_BTD, valid_BT))
    return effective_ranks(batch_gram(batch.mean_BD, batch.counts_B))


def hidden_rms(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Root mean square of a hidden state.

    sqrt(mean of x^2 over samples, tokens and width)                                       (tsemon)

    Takes X (..., B, T, D), returns (...) in float64, >= 0. Samples that are not finite do not count; NaN if none is.
    Raises ShapeError for fewer than three axes.
    """
    return _of_batch("hidden_rms", x_BTD, valid_BT)


def hidden_max(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Largest absolute entry of a hidden state.

    max of |x| over the samples that are finite, tokens and width                          (tsemon)

    Takes X (..., B, T, D), returns (...), >= 0; NaN if no sample is finite. Raises ShapeError for fewer than three axes.
    """
    return _of_batch("hidden_max", x_BTD, valid_BT)


def first_hidden_norm_ratio(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Length of the first token divided by the mean length of the others. A massive first token is far above 1.

    |x_1| / mean over i > 1 of |x_i|                  (Value Residual Learning, arXiv 2410.17897, Figure 2)

    Takes X (..., T, D) and optionally which tokens count (..., T): the first that counts is the first. Returns (...), >= 0.
    NaN for one token, for zero others, and for X with NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    return token_statistics(x_BTD, valid_BT).first_ratio


def nonfinite(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Fraction of samples that hold a NaN or an infinity.

    mean over samples of [X_b is not finite]                                               (tsemon)

    Takes X (..., B, T, D), returns (...), from 0 to 1. Padding does not count. Raises ShapeError for fewer than three axes.
    """
    return _of_batch("nonfinite", x_BTD, valid_BT)


def deescalated_token_similarity(x_BTD: Tensor, tau: float, valid_BT: Tensor | None = None) -> Tensor:
    """Token similarity after a share `tau` of the mean token is removed.

    t_sim((I - tau P) X) with P = 11'/T              (Classic Transformers, arXiv 2312.06182, Eq. 21)

    Takes X (..., T, D) and optionally which tokens of the result count; `deescalate` removes the mean of all tokens.
    Returns (...), from 0 to 1. NaN if nothing is left, and for X with NaN or infinities. Raises ShapeError for fewer
    than two axes and InvalidArgument unless tau is in [0, 1].
    """
    return token_similarity(deescalate(x_BTD, tau), valid_BT)


def _of_batch(name: str, x_BTD: Tensor, valid_BT: Tensor | None) -> Tensor:
    if x_BTD.ndim < 3:
        raise ShapeError(
            f"a batch of token matrices needs axes (..., samples, tokens, width), got {tuple(x_BTD.shape)}"
        )
    stats = token_statistics(x_BTD, valid_BT)
    return state_metrics(values_of(state_sums(stats, Batch.of(stats), x_BTD.shape[-1])))[name]
