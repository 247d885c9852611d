"""What attention's values look like, read where the weights meet them: after any mixing between layers.

Axes: L blocks, B samples, H heads (of keys), S keys, K width of a head, N sampled tokens, D
the heads side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.measures.linear import ratio
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block
from tsemon.probes.padding import Padding
from tsemon.probes.part import OnHost, Partial, Reading, counted, mean, stacked
from tsemon.probes.tap import AttentionPart, Seen

MAX_TOKENS = 256
"""Tokens of one sequence of which the second moment is taken, evenly spread."""


class ValueProbe(AttentionPart):
    """Length and spread of the values in every block's self-attention."""

    RATIO, TOP = "first_value_norm_ratio", "value_top_eigenvalue"
    METRICS = (RATIO, TOP)

    def __init__(self, blocks: list[Block], depth: int, padding: Padding, calls: Calls) -> None:
        super().__init__(blocks, depth, padding, calls)
        self._ratios: dict[int, dict[str, Tensor]] = {}
        self._moments_NN: dict[int, Tensor] = {}

    def forget(self) -> None:
        super().forget()
        self._ratios, self._moments_NN = {}, {}

    def look(self, block: Block, seen: Seen) -> bool:
        values_BHSK = None if seen.values is None else seen.values()
        if values_BHSK is None:
            return False
        batch, _, keys, _ = values_BHSK.shape
        valid_BS = self._padding.valid(block.stack, batch, keys)
        if valid_BS is None:
            valid_BS = torch.ones(batch, keys, dtype=torch.bool, device=values_BHSK.device)
        if self.RATIO in self.wanted:
            self._ratios[block.number] = counted(self.RATIO, _first_norm_ratio(values_BHSK, valid_BS))
        if self.TOP in self.wanted:
            self._moments_NN[block.number] = _second_moment(values_BHSK[0], valid_BS[0])
        return True

    def collect(self) -> dict[str, Partial]:
        names = {name for sums in self._ratios.values() for name in sums}
        return {
            name: Partial(stacked(self._ratios.get(layer, {}).get(name) for layer in range(self._depth)))
            for name in names
        }

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        reading = Reading()
        if self.RATIO in sums:
            reading.layers[self.RATIO] = mean(sums, self.RATIO)
        if self._moments_NN:
            moments_LNN = stacked(self._moments_NN.get(layer) for layer in range(self._depth))
            finish = functools.partial(_top_eigenvalues, frozenset(self._moments_NN))
            reading.layers[self.TOP] = OnHost(moments_LNN, finish)
        return reading


def _first_norm_ratio(values_BHSK: Tensor, valid_BS: Tensor) -> Tensor:
    wide = torch.promote_types(values_BHSK.dtype, torch.float32)
    length_BS = torch.linalg.vector_norm(values_BHSK, dim=(1, 3), dtype=wide)
    first_B1 = valid_BS.byte().argmax(dim=-1, keepdim=True)
    others_BS = valid_BS.scatter(1, first_B1, False)
    first_B = length_BS.gather(1, first_B1).squeeze(1)
    return ratio(first_B, torch.where(others_BS, length_BS, 0.0).sum(dim=-1) / others_BS.sum(dim=-1))


def _second_moment(values_HSK: Tensor, valid_S: Tensor) -> Tensor:
    """1/N V V' or 1/N V' V of up to 256 tokens, whichever is smaller: their largest eigenvalue is the same."""
    tokens_N, is_token_N = _spread(valid_S)
    values_HNK = values_HSK.index_select(1, tokens_N).double()
    # Some models repeat each key head for the query heads that share it, others leave that to the kernel: count it once.
    is_repeated_H = (values_HNK[1:] == values_HNK[:-1]).all(dim=-1).all(dim=-1)
    values_HNK[1:].masked_fill_(is_repeated_H[:, None, None], 0.0)
    values_ND = values_HNK.transpose(0, 1).flatten(1)
    values_ND = torch.where(is_token_N[:, None], values_ND, 0.0) / is_token_N.sum().double().sqrt()
    return values_ND @ values_ND.mT if values_ND.shape[0] <= values_ND.shape[1] else values_ND.mT @ values_ND


def _spread(valid_S: Tensor) -> tuple[Tensor, Tensor]:
    """Where evenly spread tokens are, and which of these are tokens at all: there may be fewer."""
    size = min(valid_S.shape[0], MAX_TOKENS)
    num_tokens, number_N = valid_S.sum(), torch.arange(size, device=valid_S.device)
    number_N = torch.where(num_tokens <= size, number_N, (2 * number_N + 1) * num_tokens // (2 * size))
    place_N = torch.searchsorted(valid_S.cumsum(dim=0), number_N + 1).clamp_max(valid_S.shape[0] - 1)
    return place_N, number_N < num_tokens


def _top_eigenvalues(measured: frozenset[int], moments_LNN: Tensor) -> Tensor:
    """On the host: NaN for layers that were not measured, or hold a NaN or an infinity, where LAPACK would raise."""
    is_finite_L = moments_LNN.isfinite().all(dim=-1).all(dim=-1)
    top_L = torch.linalg.eigvalsh(torch.where(is_finite_L[:, None, None], moments_LNN, 0.0))[:, -1]
    is_measured_L = torch.tensor([layer in measured for layer in range(len(moments_LNN))])
    return torch.where(is_finite_L & is_measured_L, top_L.clamp_min(0), torch.nan)
