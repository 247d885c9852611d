"""Why tokens grow alike: rates over one layer, and what its attention lets one expect of them.

Axes: B any leading axes, H heads (optional), T tokens, D width. X and Y are a layer's input and output, (..., T, D); P
is its attention, (..., H, T, T), or (..., T, T) for one head. All equations: Classic Transformers, arXiv 2312.06182.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tsemon.errors import ShapeError
from tsemon.measures.linear import (
    Centred,
    as_attention,
    centred,
    checked_tokens,
    is_triangular,
    length,
    ratio,
    spectral_norm,
    spectral_radius,
    widened,
)
from tsemon.measures.tokens import TokenStatistics, token_similarity, token_statistics

__all__ = [
    "attention_escalation_rate",
    "attention_gain",
    "delta",
    "escalation_rate",
    "estimate1_rate",
    "estimate2_rate",
    "expected_rate",
    "feedforward_escalation_rate",
    "feedforward_gain",
    "gain",
    "mu_squared",
    "norm_escalation_rate",
    "norm_gain",
    "omega",
    "residual_gain",
    "second_eigenvalue",
    "xi",
]


def escalation_rate(x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """How much faster than not at all the tokens lose their diversity from X to Y.

    r(X, Y) = t_div(X) / t_div(Y)                   (Classic Transformers, arXiv 2312.06182, Definition 2, Eq. 5)

    Takes X and Y (..., T, D), returns (...): above 1 tokens grow alike, below 1 apart, from 0 to infinity. Near
    collapse it stays as precise as the tokens' differences. NaN where either is zero or Y's tokens all agree. Raises
    ShapeError where the two differ in shape.
    """
    x, y = _pair(x_BTD, y_BTD)
    return rate_of(Lengths.of(x), Lengths.of(y))


class Lengths(NamedTuple):
    """The statistics of token matrices that rates, gains and changes need; see `TokenStatistics`."""

    shared: Tensor
    own: Tensor
    unit: Tensor
    num_tokens: Tensor
    unit_mean: Tensor

    @classmethod
    def of(cls, x: TokenStatistics) -> Lengths:
        return cls(x.shared, x.own, x.unit, x.count, x.unit_mean)

    @property
    def whole(self) -> Tensor:
        """|X|, in units of `unit`."""
        return torch.hypot(self.shared, self.own)


def rate_of(x: Lengths, y: Lengths) -> Tensor:
    """Return the escalation rate from X to Y."""
    return (ratio(x.own, y.own) * ratio(y.whole, x.whole)).square()


def gain_of(x: Lengths, y: Lengths) -> Tensor:
    """Return the gain from X to Y."""
    return ratio(y.whole, x.whole) * (y.unit / x.unit)


def rms_of(x: Lengths, width: int) -> Tensor:
    """Return the root mean square of X."""
    return x.whole * x.unit / (x.num_tokens * width).sqrt()


def gain(x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Return the factor by which the root mean square of a hidden state changes from X to Y.

    |Y| / |X|, Frobenius norms                                                            (tsemon)

    Takes X and Y (..., T, D), returns (...), >= 0. NaN if X is zero. Raises ShapeError where the two differ in shape.
    """
    x, y = _pair(x_BTD, y_BTD)
    return gain_of(Lengths.of(x), Lengths.of(y))


def attention_escalation_rate(x_BTD: Tensor, a_BTD: Tensor) -> Tensor:
    """Return the escalation rate of attention alone: from a block's input X to the state A that attention adds.

    t_div(X) / t_div(A)                              (Classic Transformers, arXiv 2312.06182, Definition 2)

    Takes X and A (..., T, D), returns (...), >= 0. As `escalation_rate`.
    """
    return escalation_rate(x_BTD, a_BTD)


def attention_gain(x_BTD: Tensor, a_BTD: Tensor) -> Tensor:
    """Return the size of the state A that attention adds to a block's input X, relative to the size of X.

    |A| / |X|, Frobenius norms                                                            (tsemon)

    Takes X and A (..., T, D), returns (...), >= 0. As `gain`.
    """
    return gain(x_BTD, a_BTD)


def residual_gain(x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Return the factor by which attention with its residual changes the size of the hidden state.

    |Y| / |X|, Frobenius norms, Y = X + SA(X)                                             (tsemon)

    Takes X and Y (..., T, D), returns (...), >= 0. As `gain`.
    """
    return gain(x_BTD, y_BTD)


def feedforward_escalation_rate(y_BTD: Tensor, z_BTD: Tensor) -> Tensor:
    """Return the escalation rate of the feed-forward part with its residual.

    t_div(Y) / t_div(Z), Z = Y + FF(Y)               (Classic Transformers, arXiv 2312.06182, Definition 2)

    Takes Y and Z (..., T, D), returns (...), >= 0. As `escalation_rate`.
    """
    return escalation_rate(y_BTD, z_BTD)


def feedforward_gain(y_BTD: Tensor, z_BTD: Tensor) -> Tensor:
    """Return the factor by which the feed-forward part with its residual changes the size of the hidden state.

    |Z| / |Y|, Frobenius norms, Z = Y + FF(Y)                                             (tsemon)

    Takes Y and Z (..., T, D), returns (...), >= 0. As `gain`.
    """
    return gain(y_BTD, z_BTD)


def norm_escalation_rate(*norms: tuple[Tensor, Tensor]) -> Tensor:
    """Return the escalation rate of the norms of a block: the product of the rates from each norm's input U to its output.

    t_div(U) / t_div(N(U))                           (Classic Transformers, arXiv 2312.06182, Definition 2)

    Takes pairs of (..., T, D), returns (...), >= 0. NaN where a rate is. Raises ShapeError where the two of a pair differ
    in shape.
    """
    return torch.stack([escalation_rate(u_BTD, n_BTD) for u_BTD, n_BTD in norms]).prod(dim=0)


def norm_gain(*outputs: Tensor) -> Tensor:
    """Return how much the norms of a block scale normalized states: the product of the sizes of their outputs.

    sqrt(mean of N(U)^2 over tokens and width)                                            (tsemon)

    Whatever its input U, a norm with weights of 1 gives 1. Takes outputs (..., T, D), returns (...), >= 0. Raises
    ShapeError for fewer than two axes.
    """
    return torch.stack([rms_of(Lengths.of(token_statistics(n_BTD)), n_BTD.shape[-1]) for n_BTD in outputs]).prod(dim=0)


def xi(x_BTD: Tensor, y_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Growth of the energy that tokens share and of the energy that they do not.

    xi_1 = |P Y|^2 / |P X|^2, xi_2 = |Y - P Y|^2 / |X - P X|^2 with P = 11'/T             (Eq. 7)

    Takes X and Y (..., T, D), returns two of (...), >= 0. r(X, Y) = 1 + (xi_1 / xi_2 - 1) t_sim(X) (Proposition 3), so
    tokens grow alike exactly where xi_1 > xi_2. NaN where X has no such energy. Raises ShapeError where the two differ
    in shape.
    """
    x, y = _pair(x_BTD, y_BTD)
    growth_B = y.unit / x.unit
    return (ratio(y.shared, x.shared) * growth_B).square(), (ratio(y.own, x.own) * growth_B).square()


def mu_squared(x_BTD: Tensor, p_BHTT: Tensor) -> tuple[Tensor, Tensor]:
    """How attention changes the energy that tokens share and the energy that they do not, mean over heads.

    mu_i^2 = mean over heads k of |Pi_i P_k X|^2 / |Pi_i X|^2, Pi_1 = 11'/T, Pi_2 = I - Pi_1    (Eq. 10, Proposition 9)

    Takes X (..., T, D), the tokens that P multiplies, and P (..., H, T, T) or (..., T, T); returns two of (...), >= 0.
    NaN where X has no such energy. Raises ShapeError where the axes do not fit.
    """
    x, p_BHTT = _step(x_BTD, p_BHTT)
    column_mean_BHT = p_BHTT.mean(dim=-2)
    mean_BHD = column_mean_BHT @ x.own_BTD + column_mean_BHT.sum(dim=-1, keepdim=True) * x.mean_BD.unsqueeze(-2)
    # Rows that do not sum to exactly 1 mix the mean token into the rest. The sums are taken in float64: their rounding
    # error, times a large mean token, is more than the rest of nearly equal tokens.
    row_sum_BHT = p_BHTT.sum(dim=-1, dtype=torch.float64)
    excess_BHT = (row_sum_BHT - row_sum_BHT.mean(dim=-1, keepdim=True)).to(p_BHTT.dtype)
    moved_BHTD = p_BHTT @ x.own_BTD.unsqueeze(-3)
    moved_BHTD = (
        moved_BHTD - moved_BHTD.mean(dim=-2, keepdim=True) + excess_BHT[..., None] * x.mean_BD[..., None, None, :]
    )
    mu_1_BH = ratio(length(mean_BHD, -1), length(x.mean_BD, -1)[..., None])
    mu_2_BH = ratio(length(moved_BHTD, (-2, -1)), x.own_B[..., None])
    return mu_1_BH.square().mean(dim=-1), mu_2_BH.square().mean(dim=-1)


def omega(x_BTD: Tensor, p_BHTT: Tensor) -> Tensor:
    """How far attention moves the mean token, per head, in units of its length.

    omega = |e'P (X - Pi_1 X)| / |e'X|, e = 1/sqrt(T)                                     (Eq. 12)

    Takes X (..., T, D) and P (..., H, T, T) or (..., T, T); returns (..., H) or (...), >= 0: 0 where P is doubly
    stochastic or the tokens agree. (1 - omega)^2 bounds mu_1^2 from below. O(T D) given the column means of P. NaN
    where the mean token is zero. Raises ShapeError where the axes do not fit.
    """
    x, p_with_heads = _step(x_BTD, p_BHTT)
    omega_BH = ratio(length(p_with_heads.mean(dim=-2) @ x.own_BTD, -1), length(x.mean_BD, -1)[..., None])
    return omega_BH if p_BHTT.ndim > x_BTD.ndim else omega_BH.squeeze(-1)


def delta(p_BTT: Tensor) -> Tensor:
    """The most by which attention can stretch what tokens do not share: delta = |P - Pi_1 P|_2        (Eq. 12)

    Takes P (..., T, T), returns (...), >= 0; 0 where all queries attend alike. delta^2 bounds mu_2^2 from above. It may
    exceed 1 where P is not doubly stochastic: the uniform causal P of 64 tokens has 1.235. Exact up to 256 tokens;
    beyond, a block Krylov method whose value is low by less than 0.1 %. NaN where P holds NaN or infinities. Raises
    ShapeError unless P is square.
    """
    p_BTT = as_attention(p_BTT, square=True)
    return spectral_norm(_deflated(p_BTT)).to(p_BTT.dtype)


def second_eigenvalue(p_BTT: Tensor) -> Tensor:
    """Modulus of the second largest eigenvalue of attention, |lambda_2(P)|          (Section 2.2.2, before Eq. 17)

    Takes P (..., T, T) with rows that sum to 1, returns (...), in [0, 1]: 0 where all queries attend alike, 1 where
    some tokens never mix. The eigenvalues of a causal P are its diagonal, so there it is exact at any size. Otherwise
    it is the spectral radius of P - Pi_1 P, which lacks just the eigenvalue 1 of the vector 1: exact up to 256 tokens,
    beyond from 96 steps of Arnoldi's method, within 0.1 %, or 0.5 % where hundreds of eigenvalues are equally large. NaN
    for one token, which has no second, and where P holds NaN or infinities. Raises ShapeError unless P is square.
    """
    p_BTT = as_attention(p_BTT, square=True)
    if p_BTT.shape[-1] == 1:
        return p_BTT.new_full(p_BTT.shape[:-2], torch.nan)
    on_diagonal_B = is_triangular(p_BTT)
    second_B = p_BTT.diagonal(dim1=-2, dim2=-1).abs().topk(2, dim=-1).values[..., 1]
    if not on_diagonal_B.all():
        second_B = torch.where(on_diagonal_B, second_B, spectral_radius(_deflated(p_BTT)).to(p_BTT.dtype))
    return second_B


def expected_rate(x_BTD: Tensor, p_BHTT: Tensor, alpha: float = 1.0) -> Tensor:
    """The escalation rate to expect of Y = X + alpha P X W for a random W with variance 1/D.

    1 + alpha^2 / (1 + alpha^2 mu_2^2) (mu_1^2 - mu_2^2) t_sim(X)  (Eqs. 13 and 18, d sigma^2 = 1, without E[eta])

    Takes X (..., T, D) and P (..., H, T, T) or (..., T, T), returns (...). NaN where mu_1 or mu_2 is: tokens that all
    agree, or that share nothing. Raises ShapeError where the axes do not fit.
    """
    mu_1_squared_B, mu_2_squared_B = mu_squared(x_BTD, p_BHTT)
    return _rate(mu_1_squared_B, mu_2_squared_B, alpha, x_BTD)


def estimate1_rate(x_BTD: Tensor, p_BHTT: Tensor, alpha: float = 1.0) -> Tensor:
    """The lower bound of the expected escalation rate, from omega and delta.

    1 + alpha^2 / (1 + alpha^2 delta^2) ((1 - omega)^2 - delta^2) t_sim(X)                (Theorem 6, Eq. 16)

    With several heads (1 - omega)^2 and delta^2 are means over them (after Proposition 9). Takes X (..., T, D) and P
    (..., H, T, T) or (..., T, T), returns (...). It says nothing where omega + delta >= 1, as under a causal mask from
    16 tokens on. NaN where omega is. Raises ShapeError where the axes do not fit.
    """
    _, p_with_heads = _step(x_BTD, p_BHTT)
    omega_B = omega(x_BTD, p_BHTT)
    omega_BH = omega_B if p_BHTT.ndim > x_BTD.ndim else omega_B[..., None]
    return _rate((1 - omega_BH).square().mean(dim=-1), delta(p_with_heads).square().mean(dim=-1), alpha, x_BTD)


def estimate2_rate(x_BTD: Tensor, p_BHTT: Tensor, alpha: float = 1.0) -> Tensor:
    """The expected escalation rate as the spectral gap of attention alone would have it.

    1 + alpha^2 / (1 + alpha^2 |lambda_2|^2) (1 - |lambda_2|^2) t_sim(X)    (Corollary 7, Eq. 17, alpha as in Eq. 16)

    Proved for symmetric P, in practice closer than Estimate 1. With several heads |lambda_2|^2 is the mean over them.
    Takes X (..., T, D) and P (..., H, T, T) or (..., T, T), returns (...). NaN for one token or X = 0. Raises
    ShapeError where the axes do not fit.
    """
    _, p_with_heads = _step(x_BTD, p_BHTT)
    squared_B = second_eigenvalue(p_with_heads).square().mean(dim=-1)
    return _rate(torch.ones_like(squared_B), squared_B, alpha, x_BTD)


def _rate(mu_1_squared_B: Tensor, mu_2_squared_B: Tensor, alpha: float, x_BTD: Tensor) -> Tensor:
    gain_B = alpha**2 / (1 + alpha**2 * mu_2_squared_B) * (mu_1_squared_B - mu_2_squared_B)
    return 1 + gain_B * token_similarity(x_BTD)


def _pair(x_BTD: Tensor, y_BTD: Tensor) -> tuple[TokenStatistics, TokenStatistics]:
    if x_BTD.shape != y_BTD.shape:
        raise ShapeError(
            f"a layer's input and output need the same axes, got {tuple(x_BTD.shape)} and {tuple(y_BTD.shape)}"
        )
    return token_statistics(x_BTD), token_statistics(y_BTD)


def _step(x_BTD: Tensor, p_BHTT: Tensor) -> tuple[Centred, Tensor]:
    """X centred, and P with a head axis."""
    x_BTD, p_BHTT = widened(checked_tokens(x_BTD)), as_attention(p_BHTT, square=True)
    if p_BHTT.ndim == x_BTD.ndim:
        p_BHTT = p_BHTT.unsqueeze(-3)
    if p_BHTT.shape[:-3] != x_BTD.shape[:-2] or p_BHTT.shape[-1] != x_BTD.shape[-2]:
        raise ShapeError(
            f"tokens (..., T, D) need attention (..., H, T, T) or (..., T, T), got {tuple(x_BTD.shape)} and "
            f"{tuple(p_BHTT.shape)}"
        )
    dtype = torch.promote_types(x_BTD.dtype, p_BHTT.dtype)
    return centred(x_BTD.to(dtype)), p_BHTT.to(dtype)


def _deflated(p_BTT: Tensor) -> Tensor:
    p_BTT = p_BTT.double()
    difference_BTT = p_BTT - p_BTT[..., :1, :]  # exactly zero where all rows agree
    return difference_BTT - difference_BTT.mean(dim=-2, keepdim=True)
