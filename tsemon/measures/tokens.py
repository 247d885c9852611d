"""How alike the tokens of a sequence are.

Axes: B samples (any number of leading axes), T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.measures.linear import centred, checked_tokens, rank_of, ratio, singular_values, spectral_norm, widened

__all__ = [
    "TokenStatistics",
    "cosine_similarity",
    "deescalate",
    "effective_rank",
    "hfc_lfc",
    "token_diversity",
    "token_similarity",
    "token_statistics",
]


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Results of one pass over X (..., T, D), per sample; every field has the leading axes of X.

    The functions below and in `tsemon.measures.states` are made of these, so a hook reads an activation once.
    """

    shared: Tensor
    """Length of the mean token times sqrt(T), |P X| with P = 11'/T, in units of `unit`."""
    own: Tensor
    """Distance of the tokens from their mean, |X - P X|, in units of `unit`."""
    unit_mean: Tensor
    """Squared length of the mean of the tokens' directions x_i / |x_i|."""
    mean_token: Tensor
    """The mean token (..., D), in units of `unit`."""
    count: Tensor
    """Number of valid tokens."""
    largest: Tensor
    """Largest |x|. NaN or infinite if X is not finite."""
    unit: Tensor
    """The power of two that the lengths are divided by, so that no square over- or underflows."""
    first_ratio: Tensor
    """Length of the first valid token divided by the mean length of the others. NaN for one token, or for zero others."""

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """In the order of the arguments."""
        return tuple(getattr(self, name) for name in self.__slots__)

    @property
    def similarity(self) -> Tensor:
        return similarity(self.shared, self.own)

    @property
    def diversity(self) -> Tensor:
        return self.own.square() / (self.shared.square() + self.own.square())

    @property
    def hfc_lfc(self) -> Tensor:
        return ratio(self.own, self.shared)

    @property
    def cosine(self) -> Tensor:
        return cosine_of(self.unit_mean, self.count)


def similarity(shared: Tensor, own: Tensor) -> Tensor:
    """Token similarity from the lengths |P X| and |X - P X|."""
    return shared.square() / (shared.square() + own.square())


def cosine_of(unit_mean: Tensor, count: Tensor) -> Tensor:
    """Mean cosine between two of `count` tokens from the squared length of their mean direction."""
    # mean over i != j of u_i . u_j = (T^2 |mean u|^2 - T) / (T^2 - T)
    return torch.where(count > 1, (count * unit_mean - 1) / (count - 1), torch.nan)


def token_statistics(x_BTD: Tensor, valid_BT: Tensor | None = None, *, skip_zero: bool = False) -> TokenStatistics:
    """One pass over `x_BTD` (..., T, D), counting only tokens where `valid_BT` (..., T) is true.

    `skip_zero` leaves zero rows out of the mean direction (a zero vector has none, so otherwise the cosine is NaN).
    Raises ShapeError unless x has at least two axes, with at least one token and one feature.
    """
    x = centred(checked_tokens(x_BTD), valid_BT)
    length_BT = torch.linalg.vector_norm(x.x_BTD, dim=-1)
    if skip_zero or valid_BT is not None:
        has_length_BT = length_BT > 0
        if not skip_zero and valid_BT is not None:
            has_length_BT = has_length_BT | valid_BT.bool()
        inverse_BT = torch.where(has_length_BT, 1 / length_BT, 0.0)
        num_directions_B = has_length_BT.sum(dim=-1).to(length_BT.dtype) if skip_zero else x.count_B
    else:
        inverse_BT, num_directions_B = 1 / length_BT, x.count_B
    unit_mean_BD = (inverse_BT.unsqueeze(-2) @ x.x_BTD).squeeze(-2) / num_directions_B[..., None]
    return TokenStatistics(
        shared=x.shared_B,
        own=x.own_B,
        unit_mean=unit_mean_BD.square().sum(dim=-1),
        mean_token=x.mean_BD,
        count=num_directions_B if skip_zero else x.count_B,
        largest=x.largest_B,
        unit=x.unit_B,
        first_ratio=first_ratio(length_BT, valid_BT),
    )


def first_ratio(length_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Length of the first valid vector divided by the mean length of the other valid ones; padding has length 0."""
    if valid_BT is None:
        others_B = length_BT[..., 1:].sum(dim=-1) / (length_BT.shape[-1] - 1 or torch.nan)
        return ratio(length_BT[..., 0], others_B)
    first_B1 = valid_BT.int().argmax(dim=-1, keepdim=True).expand(*length_BT.shape[:-1], 1)  # the left may be padded
    others_B = length_BT.scatter(-1, first_B1, 0.0).sum(dim=-1) / (valid_BT.sum(dim=-1) - 1)
    return ratio(length_BT.gather(-1, first_B1)[..., 0], others_B)


def token_similarity(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """How much of a sequence's energy its tokens share.

    t_sim(X) = |P X|^2 / |X|^2 with P = 11'/T        (Classic Transformers, arXiv 2312.06182, Definition 1)

    Takes X (..., T, D) and optionally which tokens count (..., T); returns (...), a ratio in [0, 1]: 1 when all tokens
    are equal, about 1/T for independent noise. A sequence of zeros shares nothing and gives NaN, so does one that holds
    NaN or infinities. Raises ShapeError for fewer than two axes.
    """
    return token_statistics(x_BTD, valid_BT).similarity


def token_diversity(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """How much of a sequence's energy its tokens do not share.

    t_div(X) = |X - P X|^2 / |X|^2 = 1 - t_sim(X)    (Classic Transformers, arXiv 2312.06182, Definition 1)

    Computed from the centred tokens: near collapse `1 - t_sim` has no correct digit in float32. Takes X (..., T, D),
    returns (...), a ratio in [0, 1]; NaN where `token_similarity` is. Raises ShapeError for fewer than two axes.
    """
    return token_statistics(x_BTD, valid_BT).diversity


def cosine_similarity(x_BTD: Tensor, valid_BT: Tensor | None = None, *, skip_zero: bool = False) -> Tensor:
    """Mean cosine between two different tokens.

    t_cos(X) = 1/(T(T-1)) sum over i != j of x_i . x_j / (|x_i| |x_j|)    (Classic Transformers, arXiv
    2312.06182, Section 1)

    Takes X (..., T, D), returns (...) in [-1, 1], in O(T D) from the mean direction. One token has no pair and gives
    NaN; a zero token has no direction and gives NaN unless `skip_zero`. Raises ShapeError for fewer than two axes.
    """
    return token_statistics(x_BTD, valid_BT, skip_zero=skip_zero).cosine


def deescalate(x_BTD: Tensor, tau: float) -> Tensor:
    """Give up a share `tau` of the mean token.

    Y = (I - tau P) X with P = 11'/T                 (Classic Transformers, arXiv 2312.06182, Eq. 21)

    Takes and returns (..., T, D). Its similarity is (1-tau)^2 s / ((1-tau)^2 s + 1 - s) for s = t_sim(X).
    A sequence that holds NaN or infinities has no mean token and becomes NaN as a whole.
    Raises ShapeError for fewer than two axes and InvalidArgument unless tau is in [0, 1].
    """
    if x_BTD.ndim < 2:
        raise ShapeError(f"a token matrix needs axes (..., tokens, width), got {tuple(x_BTD.shape)}")
    if not 0 <= tau <= 1:
        raise InvalidArgument(f"tau is a share of the mean token, expected 0 to 1, got {tau}")
    mean_B1D = x_BTD.mean(dim=-2, keepdim=True)
    # A mean of T equal floats need not equal them, and tau = 1 would leave noise where nothing is left.
    mean_B1D = mean_B1D + (x_BTD - mean_B1D).mean(dim=-2, keepdim=True)
    is_finite_B11 = x_BTD.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    return torch.where(is_finite_B11, x_BTD - tau * mean_B1D, torch.nan)


def hfc_lfc(x_BTD: Tensor, norm: Literal["frobenius", "spectral"] = "frobenius") -> Tensor:
    """High-frequency against low-frequency content of a sequence: differences of tokens against their mean.

    |X - P X| / |P X| with P = 11'/T                 (Transformer Oversmoothing, Definition 1)

    The paper is Setting the Record Straight on Transformer Oversmoothing, and writes |.|_2. In the Frobenius norm the
    ratio is exactly sqrt(t_div / t_sim); in the spectral norm its numerator is the largest singular value alone, so it
    is at most as large. Takes X (..., T, D), returns (...), from 0 (all tokens equal) to infinity. NaN where the mean
    token is zero. The spectral norm is exact up to 256 tokens or features, beyond that low by less than 0.1 %. Raises
    ShapeError for fewer than two axes and InvalidArgument for another norm.
    """
    if norm not in ("frobenius", "spectral"):
        raise InvalidArgument(f"norm is 'frobenius' or 'spectral', got {norm!r}")
    x = centred(checked_tokens(x_BTD))
    return ratio(x.own_B if norm == "frobenius" else spectral_norm(x.own_BTD).to(x.own_B.dtype), x.shared_B)


def effective_rank(x_BTD: Tensor) -> Tensor:
    """How many directions the tokens use, weighed by how much.

    exp(-sum_i p_i log p_i), p_i = sigma_i / sum_j sigma_j          (Transformer Oversmoothing, Definition 3)

    The singular values themselves, not their squares, of X as it is, without centering; the paper's second minus sign
    inside the sum is a misprint. Takes X (..., T, D), returns (...), from 1 (rank one) to min(T, D). Exact up to 256 tokens
    or features; beyond that from the Gram matrix, whose smallest singular values are 3e-8 of the largest, not 0. NaN for
    X = 0. Raises ShapeError for fewer than two axes.
    """
    x_BTD = checked_tokens(x_BTD)
    return rank_of(singular_values(x_BTD)).to(widened(x_BTD).dtype)
