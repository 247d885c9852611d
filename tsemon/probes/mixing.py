"""How fast attention alone would mix the tokens: the second eigenvalue of its matrix, which is never held.

Axes: L blocks, H heads, T tokens, R rows of them, K steps of Arnoldi's method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from tsemon.measures.linear import arnoldi, eigenvalues
from tsemon.measures.rows import CHUNK_WEIGHTS
from tsemon.measures.scores import Scores
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block
from tsemon.probes.padding import Padding
from tsemon.probes.part import OnHost, Reading, stacked
from tsemon.probes.tap import AttentionPart, Seen

NUM_STEPS = 32
"""Of Arnoldi's method, each a pass over all attention weights."""
EXHAUSTED = 1e-9
"""A new direction this short is rounding: the space of a few tokens, or of equal rows, has no more."""


class MixingProbe(AttentionPart):
    """The spectral gap of every block's self-attention in the first sequence of one forward pass."""

    METRICS = ("spectral_gap",)

    def __init__(self, blocks: list[Block], depth: int, padding: Padding, calls: Calls) -> None:
        super().__init__(blocks, depth, padding, calls)
        self._spectra: dict[int, Tensor] = {}

    def forget(self) -> None:
        super().forget()
        self._spectra = {}

    def look(self, block: Block, seen: Seen) -> bool:
        if seen.scores is None:
            return False
        scores = seen.scores()
        valid_BT = self._padding.valid(block.stack, scores.size.batch, scores.size.keys)
        valid_BT = scores.sees_itself() if valid_BT is None else valid_BT
        if valid_BT is None:
            valid_BT = torch.ones(1, scores.size.keys, dtype=torch.bool, device=scores.device)
        if scores.size.queries == scores.size.keys:
            self._spectra[block.number] = _spectrum(_Chunks(scores.of(slice(0, 1)), valid_BT[0]))
        return True

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if not self._spectra:
            return Reading()
        spectra = stacked((self._spectra.get(layer) for layer in range(self._depth)), torch.nan)
        return Reading({"spectral_gap": OnHost(spectra, _gaps)})


class _Chunks:
    """The attention matrix of the tokens of one sequence, a few rows at a time."""

    def __init__(self, scores: Scores, valid_T: Tensor) -> None:
        self.scores = scores
        self.valid_T = valid_T
        self._rows = torch.arange(len(valid_T), device=scores.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows, their weights (H, R, T), and whether any of them sees a later token."""
        for rows in torch.split(self._rows, max(1, CHUNK_WEIGHTS // (self.scores.size.heads * self.scores.size.keys))):
            scores_HRT, visible_HRT = (of_samples[0] for of_samples in self.scores.at(rows))
            visible_HRT = visible_HRT & self.valid_T & self.valid_T.index_select(0, rows)[:, None]
            weights_HRT = scores_HRT.masked_fill(~visible_HRT, -torch.inf).softmax(dim=-1)
            weights_HRT = weights_HRT.masked_fill(~visible_HRT.any(dim=-1, keepdim=True), 0.0)
            yield rows, weights_HRT, (visible_HRT & (self._rows > rows[:, None])).any()

    def mix(self, x_HT: Tensor) -> Tensor:
        """P x less its mean over tokens: without the eigenvalue 1 of the vector 1 and, as P 1 = 1, with all others."""
        y_HT = torch.cat([(weights.double() @ x_HT[..., None])[..., 0] for _, weights, _ in self], dim=-1)
        return torch.where(self.valid_T, y_HT - y_HT.sum(dim=-1, keepdim=True) / self.valid_T.sum(), 0.0)


def _spectrum(chunks: _Chunks) -> Tensor:
    """Per head the second entry of the diagonal, whether that is the second eigenvalue, and if it may not be, (H, 2 + ...)
    what Arnoldi's method found: a mask may be causal without saying so, and the host decides."""
    diagonal, looks_ahead = [], []
    for rows, weights_HRT, looks in chunks:
        diagonal.append(weights_HRT.gather(-1, rows.expand(weights_HRT.shape[0], -1)[..., None])[..., 0])
        looks_ahead.append(looks)
    diagonal_HT = torch.cat(diagonal, dim=-1).double()
    # The first token sees only itself, and this is the eigenvalue 1 of the vector 1.
    is_first_T = torch.arange(len(chunks.valid_T), device=diagonal_HT.device) == chunks.valid_T.byte().argmax()
    is_later_T = chunks.valid_T & ~is_first_T
    second_H = torch.where(is_later_T, diagonal_HT, -torch.inf).amax(dim=-1)
    is_causal_H = (~torch.stack(looks_ahead).any()).to(second_H.dtype).expand(second_H.shape)
    found = [torch.stack([torch.where(is_later_T.any(), second_H, torch.nan), is_causal_H], dim=-1)]
    if not chunks.scores.is_causal:
        found.append(_krylov(chunks.mix, chunks.valid_T, len(second_H)).flatten(1))
    return torch.cat(found, dim=-1)


def _krylov(mix: Callable[[Tensor], Tensor], valid_T: Tensor, num_heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # its own: the run's random numbers stay as they are
    start_T = torch.randn(len(valid_T), generator=generator, dtype=torch.float64).to(valid_T.device)
    start_T = torch.where(valid_T, start_T, 0.0)
    start_T = torch.where(valid_T, start_T - start_T.sum() / valid_T.sum(), 0.0)
    return arnoldi(mix, start_T.expand(num_heads, -1), NUM_STEPS)


def _gaps(spectra_LHN: Tensor) -> Tensor:
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
