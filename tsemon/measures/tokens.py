"""How alike the tokens of a sequence are.

Axes: B samples (any number of leading axes), T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.measures.linear import as_tokens, centred, ratio, singular_values, spectral_norm


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """What one pass over X (..., T, D) yields per sample; every field has the leading axes of X.

    The functions below are ratios of these, so a hook that needs several reads the activation once.
    """

    shared: Tensor
    """Energy of the mean token, |P X|^2 with P = 11'/T, in units of `scale`^2."""
    own: Tensor
    """Energy around the mean token, |X - P X|^2, in units of `scale`^2."""
    unit_mean: Tensor
    """Squared length of the mean of the tokens' directions x_i / |x_i|."""
    mean_token: Tensor
    """The mean token (..., D), in units of `scale`."""
    count: Tensor
    """Number of valid tokens."""
    scale: Tensor
    """Largest |x|. Energies are held relative to it, so that no square over- or underflows. NaN or inf if X is."""
    first_ratio: Tensor
    """Length of the first valid token against the mean length of the others; NaN of one token, or of zero others."""

    @property
    def similarity(self) -> Tensor:
        return self.shared / (self.shared + self.own)

    @property
    def diversity(self) -> Tensor:
        return self.own / (self.shared + self.own)

    @property
    def cosine(self) -> Tensor:
        # mean over i != j of u_i . u_j = (T^2 |mean u|^2 - T) / (T^2 - T)
        cosine = (self.count * self.unit_mean - 1) / (self.count - 1)
        return torch.where(self.count > 1, cosine, torch.nan)


def token_statistics(x_BTD: Tensor, valid_BT: Tensor | None = None, *, skip_zero: bool = False) -> TokenStatistics:
    """One pass over `x_BTD` (..., T, D), counting only tokens where `valid_BT` (..., T) is true.

    `skip_zero` leaves zero rows out of the mean direction (a zero vector has none, so otherwise the cosine is NaN).
    Raises ShapeError unless x has at least two axes, with at least one token and one feature.
    """
    if x_BTD.ndim < 2 or 0 in x_BTD.shape[-2:]:
        raise ShapeError(f"a token matrix needs axes (..., tokens >= 1, width >= 1), got {tuple(x_BTD.shape)}")
    x_BTD = x_BTD.detach().to(torch.promote_types(x_BTD.dtype, torch.float32))
    if valid_BT is None:
        count_B = x_BTD.new_full(x_BTD.shape[:-2], x_BTD.shape[-2])
        weight_BT1 = None
    else:
        weight_BT1 = valid_BT.to(x_BTD.dtype).unsqueeze(-1)
        # A padding row may hold anything, NaN too, and NaN * 0 is NaN.
        x_BTD = torch.where(valid_BT.bool().unsqueeze(-1), x_BTD, 0.0)
        count_B = weight_BT1.sum(dim=(-2, -1))

    # Largest |x|. On a CPU the infinity norm takes as long as everything else here together.
    scale_B = torch.maximum(x_BTD.amax(dim=(-2, -1)), -x_BTD.amin(dim=(-2, -1)))
    # Not x / scale: dividing zeros by their scale 0 gives NaN, and a matrix of zeros still has a (zero) energy.
    x_BTD = x_BTD / torch.where(scale_B > 0, scale_B, 1.0)[..., None, None].clamp_min(torch.finfo(x_BTD.dtype).tiny)
    mean_BD = x_BTD.sum(dim=-2) / count_B[..., None]

    length_BT = torch.linalg.vector_norm(x_BTD, dim=-1)
    if skip_zero or weight_BT1 is not None:
        has_length_BT = length_BT > 0
        if not skip_zero and valid_BT is not None:
            has_length_BT = has_length_BT | valid_BT.bool()
        inverse_BT = torch.where(has_length_BT, 1 / length_BT, 0.0)
        num_directions_B = has_length_BT.sum(dim=-1).to(x_BTD.dtype) if skip_zero else count_B
    else:
        inverse_BT, num_directions_B = 1 / length_BT, count_B
    unit_mean_BD = (inverse_BT.unsqueeze(-2) @ x_BTD).squeeze(-2) / num_directions_B[..., None]

    own_BTD = x_BTD - mean_BD.unsqueeze(-2)
    if weight_BT1 is not None:
        own_BTD = own_BTD * weight_BT1
    return TokenStatistics(
        shared=count_B * mean_BD.square().sum(dim=-1),
        own=torch.linalg.vector_norm(own_BTD, dim=(-2, -1)).square(),
        unit_mean=unit_mean_BD.square().sum(dim=-1),
        mean_token=mean_BD,
        count=num_directions_B if skip_zero else count_B,
        scale=scale_B,
        first_ratio=_first_ratio(length_BT, valid_BT),
    )


def _first_ratio(length_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
    """The lengths of padding are 0."""
    if valid_BT is None:
        others_B = length_BT[..., 1:].sum(dim=-1) / (length_BT.shape[-1] - 1 or torch.nan)
        return ratio(length_BT[..., 0], others_B)
    first_B1 = valid_BT.int().argmax(dim=-1, keepdim=True)  # on the left there may be padding
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

    t_cos(X) = 1/(T(T-1)) sum over i != j of x_i . x_j / (|x_i| |x_j|)    (Classic Transformers, Section 1)

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
    x = centred(as_tokens(x_BTD))
    own_B = x.own_B if norm == "frobenius" else spectral_norm(x.own_BTD).to(x.own_B.dtype)
    return ratio(own_B, x.shared_B)


def effective_rank(x_BTD: Tensor) -> Tensor:
    """How many directions the tokens use, weighed by how much.

    exp(-sum_i p_i log p_i), p_i = sigma_i / sum_j sigma_j          (Transformer Oversmoothing, Definition 3)

    The singular values themselves, not their squares, of X as it is, not centred; the paper's second minus sign inside
    the sum is a slip. Takes X (..., T, D), returns (...), from 1 (rank one) to min(T, D). Exact up to 256 tokens or
    features; beyond that from the Gram matrix, whose smallest singular values are 3e-8 of the largest, not 0. NaN for
    X = 0. Raises ShapeError for fewer than two axes.
    """
    x_BTD = as_tokens(x_BTD)
    sigma_BK = singular_values(x_BTD)
    share_BK = ratio(sigma_BK, sigma_BK.sum(dim=-1, keepdim=True))
    entropy_B: Tensor = torch.special.entr(share_BK).sum(dim=-1)
    return entropy_B.exp().to(x_BTD.dtype)
