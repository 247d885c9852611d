"""Linear algebra that the measures share: safe at any scale, exact near collapse, NaN in and NaN out.

Axes: B any leading axes, M rows, N columns (of any matrix), T tokens, D width. Spectra are taken in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tsemon.errors import ShapeError

EXACT = 256
"""Up to this size a matrix is decomposed; beyond it, the named approximation is used."""


class Centred(NamedTuple):
    """A token matrix, in units of `unit_B`, split into its mean token and the rest of each token."""

    x_BTD: Tensor
    """Padding is zero."""
    mean_BD: Tensor
    own_BTD: Tensor
    """X - P X with P = 11'/T. Padding is zero."""
    shared_B: Tensor
    """|P X|."""
    own_B: Tensor
    """|X - P X|."""
    count_B: Tensor
    """Number of valid tokens."""
    largest_B: Tensor
    """Largest |x|, not divided by the unit. NaN or infinite if X is not finite."""
    unit_B: Tensor
    """A power of two near `largest_B`, so that no square over- or underflows and the division rounds nothing."""


def widened(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def undefined_unless_finite(x_BMN: Tensor) -> Tensor:
    """NaN throughout where a matrix holds NaN or infinities: x / inf would be 0, a made-up number."""
    return torch.where(x_BMN.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True), x_BMN, torch.nan)


def checked_tokens(x_BTD: Tensor) -> Tensor:
    """The same tensor. Raises ShapeError unless it has at least two axes, none of the last two empty."""
    if x_BTD.ndim < 2 or 0 in x_BTD.shape[-2:]:
        raise ShapeError(f"a token matrix needs axes (..., tokens >= 1, width >= 1), got {tuple(x_BTD.shape)}")
    return x_BTD


def as_tokens(x_BTD: Tensor) -> Tensor:
    return undefined_unless_finite(widened(checked_tokens(x_BTD)))


def as_attention(p_BQK: Tensor, *, square: bool = False) -> Tensor:
    if p_BQK.ndim < 2 or 0 in p_BQK.shape[-2:] or (square and p_BQK.shape[-2] != p_BQK.shape[-1]):
        needed = "(..., tokens, tokens)" if square else "(..., queries, keys)"
        raise ShapeError(f"attention needs axes {needed}, none of them empty, got {tuple(p_BQK.shape)}")
    return undefined_unless_finite(widened(p_BQK))


def power_of_two(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The largest power of two that is at most max |x|, with `dim` kept as 1. Dividing by it rounds nothing."""
    unit = unit_of(torch.linalg.vector_norm(x, ord=torch.inf, dim=dim, keepdim=True))
    return torch.where(unit.isnan(), 1.0, unit)


def unit_of(largest: Tensor) -> Tensor:
    """The largest power of two that is at most `largest`; 1 for 0 and NaN, and NaN for infinity."""
    return torch.where(largest > 0, largest / (2 * torch.frexp(largest).mantissa), 1.0)


def length(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Euclidean norm over `dim`. Its squares neither overflow nor vanish: 1e20 squared is no float32."""
    scale = power_of_two(x, dim)
    norm: Tensor = torch.linalg.vector_norm(x / scale, dim=dim) * scale.squeeze(dim)
    return norm


def centred(x_BTD: Tensor, valid_BT: Tensor | None = None) -> Centred:
    """Split X, whose tokens count where `valid_BT` is true, into its mean token and the rest.

    The rest is taken from differences to the first token: if tokens nearly agree these are exact, and if they do agree the
    rest is exactly zero. A mean of T equal floats need not equal them.
    """
    x_BTD = widened(x_BTD)
    if valid_BT is not None:
        # A padding row may hold anything, NaN too, and NaN * 0 is NaN.
        x_BTD = torch.where(valid_BT.bool().unsqueeze(-1), x_BTD, 0.0)
    # On a CPU the infinity norm takes as long as everything else here together.
    largest_B = torch.maximum(x_BTD.amax(dim=(-2, -1)), -x_BTD.amin(dim=(-2, -1)))
    unit_B = unit_of(largest_B)
    x_BTD = x_BTD / unit_B[..., None, None]
    if valid_BT is None:
        count_B = x_BTD.new_full(x_BTD.shape[:-2], x_BTD.shape[-2])
        own_BTD = x_BTD - x_BTD[..., :1, :]
        own_BTD -= own_BTD.mean(dim=-2, keepdim=True)
    else:
        weight_BT1 = valid_BT.to(x_BTD.dtype).unsqueeze(-1)
        count_B = weight_BT1.sum(dim=(-2, -1))
        first_B1D = x_BTD.take_along_dim(valid_BT.int().argmax(dim=-1)[..., None, None], dim=-2)
        own_BTD = (x_BTD - first_B1D).mul_(weight_BT1)
        own_BTD -= own_BTD.sum(dim=-2, keepdim=True) / count_B[..., None, None]
        own_BTD *= weight_BT1
    mean_BD = x_BTD.sum(dim=-2) / count_B[..., None]
    return Centred(
        x_BTD=x_BTD,
        mean_BD=mean_BD,
        own_BTD=own_BTD,
        shared_B=torch.linalg.vector_norm(mean_BD, dim=-1) * count_B.sqrt(),
        own_B=torch.linalg.vector_norm(own_BTD, dim=(-2, -1)),
        count_B=count_B,
        largest_B=largest_B,
        unit_B=unit_B,
    )


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; NaN, not infinity, over zero."""
    return torch.where(denominator == 0, torch.nan, numerator / denominator)


def singular_values(x_BMN: Tensor) -> Tensor:
    """All of them, in float64 and descending, (..., min(M, N)); NaN for a matrix with NaN or infinities.

    Up to EXACT on the shorter side they are right to 1e-15 of the largest, beyond it, from the Gram matrix, to 3e-8.
    """
    x_BMN, is_finite_B, scale_B = _prepared(x_BMN)
    is_small = min(x_BMN.shape[-2:]) <= EXACT
    sigma_BN = torch.linalg.svdvals(x_BMN) if is_small else values_of_gram(gram(x_BMN))
    return torch.where(is_finite_B[..., None], sigma_BN * scale_B[..., None], torch.nan)


def gram(x_BMN: Tensor) -> Tensor:
    """X'X or XX', whichever is smaller: (..., K, K) with the squares of the singular values for eigenvalues."""
    return x_BMN.mT @ x_BMN if x_BMN.shape[-1] <= x_BMN.shape[-2] else x_BMN @ x_BMN.mT


def values_of_gram(gram_BKK: Tensor) -> Tensor:
    """The singular values, descending, of matrices with these Gram matrices, which are finite."""
    sigma_BK: Tensor = torch.linalg.eigvalsh(gram_BKK).clamp_min(0).sqrt().flip(-1)
    return sigma_BK


def rank_of(sigma_BK: Tensor) -> Tensor:
    """exp(-sum_i p_i log p_i), p_i = sigma_i / sum_j sigma_j: effective rank from singular values. NaN if all are 0."""
    share_BK = ratio(sigma_BK, sigma_BK.sum(dim=-1, keepdim=True))
    entropy_B: Tensor = torch.special.entr(share_BK).sum(dim=-1)
    return entropy_B.exp()


def spectral_norm(x_BMN: Tensor) -> Tensor:
    """The largest singular value, in float64; NaN for a matrix with NaN or infinities.

    Up to EXACT on the shorter side exact; beyond it from a Krylov space of 12 blocks of 8 vectors, which can only be
    low: by 5e-6 on noise, by up to 5e-4 where hundreds of singular values crowd below the largest (attention to a few
    neighbours), and by rounding alone where one stands out.
    """
    x_BMN, is_finite_B, scale_B = _prepared(x_BMN)
    if min(x_BMN.shape[-2:]) <= EXACT:
        gram_BNN = gram(x_BMN)
    else:
        generator = torch.Generator().manual_seed(0)  # its own: the run's random numbers stay as they are
        block_BNK = torch.randn(x_BMN.shape[-1], 8, generator=generator, dtype=torch.float64).to(x_BMN.device)
        blocks = []
        for _ in range(12):
            block_BNK = torch.linalg.qr(x_BMN.mT @ (x_BMN @ block_BNK)).Q
            blocks.append(block_BNK)
        gram_BNN = gram(x_BMN @ torch.linalg.qr(torch.cat(blocks, dim=-1)).Q)
    sigma_B = torch.linalg.eigvalsh(gram_BNN)[..., -1].clamp_min(0).sqrt()
    return torch.where(is_finite_B, sigma_B * scale_B, torch.nan)


def eigenvalues(x_BNN: Tensor) -> Tensor:
    """All of them, complex128, (..., N); NaN for a matrix with NaN or infinities.

    On the CPU, wherever X is: LAPACK balances the matrix first, which leaves a triangular one, causal attention, its exact
    diagonal. Its eigenvectors are close to parallel, and without that the answer would be complex noise.
    """
    x_BNN, is_finite_B, scale_B = _prepared(x_BNN)
    values_BN = torch.linalg.eigvals(x_BNN.cpu()).to(x_BNN.device)
    return torch.where(is_finite_B[..., None], values_BN * scale_B[..., None], torch.nan)


def spectral_radius(x_BNN: Tensor) -> Tensor:
    """The largest modulus of an eigenvalue, in float64; NaN for a matrix with NaN or infinities.

    Up to EXACT from all eigenvalues. Beyond it from 96 steps of Arnoldi's method, within 1e-3 on noise, 5e-3 on a cyclic
    shift, whose eigenvalues are all equally large, and by rounding alone where one stands out.
    """
    if x_BNN.shape[-1] <= EXACT:
        return eigenvalues(x_BNN).abs().amax(dim=-1)
    x_BNN, is_finite_B, scale_B = _prepared(x_BNN)
    generator = torch.Generator().manual_seed(0)
    start_N = torch.randn(x_BNN.shape[-1], generator=generator, dtype=torch.float64).to(x_BNN.device)
    projected_BKK = arnoldi(lambda y_BN: (x_BNN @ y_BN[..., None])[..., 0], x_BNN @ start_N, num_steps=96)
    radius_B = torch.linalg.eigvals(projected_BKK[..., :-1, :].cpu()).to(x_BNN.device).abs().amax(dim=-1)
    return torch.where(is_finite_B, radius_B * scale_B, torch.nan)


def arnoldi(multiply: Callable[[Tensor], Tensor], start_BN: Tensor, num_steps: int) -> Tensor:
    """A matrix seen from the Krylov space of a vector: its Hessenberg matrix (..., num_steps + 1, num_steps).

    `multiply` is all that is known of it. The eigenvalues without the last row come near the matrix's outermost ones. An
    entry below the diagonal that is nearly 0 ends the space: all entries after it are noise.
    """
    basis_BNK = start_BN.new_zeros(*start_BN.shape, num_steps + 1)
    basis_BNK[..., 0] = _unit(start_BN)
    projected_BKK = start_BN.new_zeros(*start_BN.shape[:-1], num_steps + 1, num_steps)
    for step in range(num_steps):
        known_BNK = basis_BNK[..., : step + 1]
        next_BN1 = multiply(basis_BNK[..., step])[..., None]
        for _ in range(2):  # once leaves the basis visibly not orthogonal
            overlap_BK1 = known_BNK.mT @ next_BN1
            next_BN1 = next_BN1 - known_BNK @ overlap_BK1
            projected_BKK[..., : step + 1, step] += overlap_BK1[..., 0]
        projected_BKK[..., step + 1, step] = torch.linalg.vector_norm(next_BN1, dim=(-2, -1))
        basis_BNK[..., step + 1] = _unit(next_BN1[..., 0])
    return projected_BKK


def is_triangular(x_BNN: Tensor) -> Tensor:
    is_zero_BNN = x_BNN == 0
    is_lower_B = (is_zero_BNN | torch.ones_like(is_zero_BNN).tril()).all(dim=-1).all(dim=-1)
    is_upper_B = (is_zero_BNN | torch.ones_like(is_zero_BNN).triu()).all(dim=-1).all(dim=-1)
    return is_lower_B | is_upper_B


def _prepared(x_BMN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """X in float64 over its scale, or zeros where it is not finite (LAPACK raises there), and both."""
    x_BMN = x_BMN.detach().double()
    is_finite_B = x_BMN.isfinite().all(dim=-1).all(dim=-1)
    x_BMN = torch.where(is_finite_B[..., None, None], x_BMN, 0.0)
    scale_B11 = power_of_two(x_BMN, (-2, -1))
    return x_BMN / scale_B11, is_finite_B, scale_B11[..., 0, 0]


def _unit(x_BN: Tensor) -> Tensor:
    norm_B1 = torch.linalg.vector_norm(x_BN, dim=-1, keepdim=True)
    return x_BN / torch.where(norm_B1 > 0, norm_B1, 1.0)
