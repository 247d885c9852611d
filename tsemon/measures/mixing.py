"""How fast attention alone would mix the tokens: the second eigenvalue of its matrix, which need not be held.

Axes: L blocks, H heads, T tokens, R rows of them, K steps of Arnoldi's method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tsemon.measures.linear import arnoldi, as_attention, eigenvalues
from tsemon.measures.rows import CHUNK_WEIGHTS
from tsemon.measures.scores import Scores

__all__ = ["spectral_gap"]

NUM_STEPS = 32
"""Steps of Arnoldi's method, each a pass over all attention weights."""
EXHAUSTED = 1e-9
"""A new direction this short is rounding: the space of a few tokens, or of equal rows, has no more."""


def spectral_gap(p_BHTT: Tensor, valid_BT: Tensor | None = None) -> Tensor:
    """Return how fast attention alone would mix the tokens.

    1 - |lambda_2(P)|, mean over heads               (Classic Transformers, arXiv 2312.06182, Section 2.2)

    Takes P (..., H, T, T) or (T, T) with rows that sum to 1, and optionally which tokens count (..., T); returns (...), from
    0 (some tokens never mix) to 1 (all queries attend alike). Exact, from the diagonal, if P is causal; else from 32 steps
    of Arnoldi's method: within 0.001, or 0.003 if attention goes to a few neighbors. `second_eigenvalue` is exact up to 256
    tokens. Heads that hold NaN or infinities do not count; NaN if none is left, and for one token. Raises ShapeError unless
    P is square.
    """
    p_BHTT = as_attention(p_BHTT, square=True)
    p_BHTT = p_BHTT.unsqueeze(0) if p_BHTT.ndim == 2 else p_BHTT
    tokens, leading = p_BHTT.shape[-1], p_BHTT.shape[:-3]
    valid_BT = p_BHTT.new_ones(*leading, tokens, dtype=torch.bool) if valid_BT is None else valid_BT
    samples = zip(p_BHTT.reshape(-1, *p_BHTT.shape[-3:]), valid_BT.reshape(-1, tokens), strict=True)
    return gaps(torch.stack([spectrum(Held(p_HTT, valid_T)) for p_HTT, valid_T in samples])).reshape(leading)


class Matrix:
    """An attention matrix as far as its second eigenvalue needs it: some rows at a time."""

    is_causal = False
    """Whether it is known to be, without a look at the device."""

    def __init__(self, valid_T: Tensor) -> None:
        self.valid_T = valid_T

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows, their weights (H, R, T), and whether any of them sees a later token."""
        raise NotImplementedError

    def mix(self, x_HT: Tensor) -> Tensor:
        """P x less its mean over tokens: without the eigenvalue 1 of the vector 1 and, as P 1 = 1, with all others."""
        y_HT = torch.cat([(weights.double() @ x_HT[..., None])[..., 0] for _, weights, _ in self], dim=-1)
        return torch.where(self.valid_T, y_HT - y_HT.sum(dim=-1, keepdim=True) / self.valid_T.sum(), 0.0)


class Held(Matrix):
    """A matrix (H, T, T) that is there as a whole."""

    def __init__(self, p_HTT: Tensor, valid_T: Tensor) -> None:
        super().__init__(valid_T)
        self._p_HTT = torch.where(valid_T & valid_T[:, None], p_HTT, 0.0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        yield torch.arange(len(self.valid_T), device=self.valid_T.device), self._p_HTT, (self._p_HTT.triu(1) != 0).any()


class Chunks(Matrix):
    """The matrix of the tokens of one sequence, a few rows at a time."""

    def __init__(self, scores: Scores, valid_T: Tensor) -> None:
        super().__init__(valid_T)
        self._scores = scores
        self._rows = torch.arange(len(valid_T), device=scores.device)
        self.is_causal = scores.is_causal

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for rows in torch.split(
            self._rows, max(1, CHUNK_WEIGHTS // (self._scores.size.heads * self._scores.size.keys))
        ):
            scores_HRT, visible_HRT = (of_samples[0] for of_samples in self._scores.at(rows))
            visible_HRT = visible_HRT & self.valid_T & self.valid_T.index_select(0, rows)[:, None]
            weights_HRT = scores_HRT.masked_fill(~visible_HRT, -torch.inf).softmax(dim=-1)
            weights_HRT = weights_HRT.masked_fill(~visible_HRT.any(dim=-1, keepdim=True), 0.0)
            yield rows, weights_HRT, (visible_HRT & (self._rows > rows[:, None])).any()


def spectrum(matrix: Matrix) -> Tensor:
    """Per head the second entry of the diagonal, whether that is the second eigenvalue, and if it may not be, (H, 2 + ...)
    what Arnoldi's method found: a mask may be causal without saying so, and the host decides."""
    diagonal, looks_ahead = [], []
    for rows, weights_HRT, looks in matrix:
        diagonal.append(weights_HRT.gather(-1, rows.expand(weights_HRT.shape[0], -1)[..., None])[..., 0])
        looks_ahead.append(looks)
    diagonal_HT = torch.cat(diagonal, dim=-1).double()
    # The first token sees only itself, and this is the eigenvalue 1 of the vector 1.
    is_first_T = torch.arange(len(matrix.valid_T), device=diagonal_HT.device) == matrix.valid_T.byte().argmax()
    is_later_T = matrix.valid_T & ~is_first_T
    second_H = torch.where(is_later_T, diagonal_HT, -torch.inf).amax(dim=-1)
    is_causal_H = (~torch.stack(looks_ahead).any()).to(second_H.dtype).expand(second_H.shape)
    found = [torch.stack([torch.where(is_later_T.any(), second_H, torch.nan), is_causal_H], dim=-1)]
    if not matrix.is_causal:
        found.append(_krylov(matrix.mix, matrix.valid_T, len(second_H)).flatten(1))
    return torch.cat(found, dim=-1)


def _krylov(mix: Callable[[Tensor], Tensor], valid_T: Tensor, num_heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # its own: the run's random numbers stay as they are
    start_T = torch.randn(len(valid_T), generator=generator, dtype=torch.float64).to(valid_T.device)
    start_T = torch.where(valid_T, start_T, 0.0)
    start_T = torch.where(valid_T, start_T - start_T.sum() / valid_T.sum(), 0.0)
    return arnoldi(mix, start_T.expand(num_heads, -1), NUM_STEPS)


def gaps(spectra_LHN: Tensor) -> Tensor:
    """On the host: 1 - |lambda_2|, mean over heads."""
    return torch.tensor(
        [1 - torch.tensor([_second(spectrum_N) for spectrum_N in spectra_HN]).nanmean() for spectra_HN in spectra_LHN]
    )


def _second(spectrum_N: Tensor) -> float:
    on_diagonal, is_causal = spectrum_N[:2].tolist()
    if is_causal != 0.0:
        return float(on_diagonal)
    hessenberg_KK = spectrum_N[2:].view(NUM_STEPS + 1, NUM_STEPS)
    is_end_K = hessenberg_KK.diagonal(-1) < EXHAUSTED
    size = int(is_end_K.byte().argmax()) + 1 if is_end_K.any() else NUM_STEPS
    return float(eigenvalues(hessenberg_KK[:size, :size]).abs().amax())
