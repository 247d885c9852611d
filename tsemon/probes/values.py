"""What attention's values look like, read where the weights meet them: after any mixing between layers.

Axes: B samples, H heads (of keys), S keys, K width of a head, N the shorter side of (S, H K), L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.measures.choosing import evenly_spread
from tsemon.measures.sums import counted, mean
from tsemon.measures.tokens import first_ratio
from tsemon.measures.values import heads_side_by_side, second_moment, top_eigenvalues, value_lengths
from tsemon.probes.discovery import Block
from tsemon.probes.quantities import with_padding
from tsemon.probes.reading import OnHost, Reading, stacked
from tsemon.probes.tap import AttentionPart, Seen

MAX_TOKENS = 256
"""Tokens of one sequence of which the second moment is taken, evenly spread."""


class ValueProbe(AttentionPart):
    """Length and spread of the values in every block's self-attention."""

    RATIO, TOP = "first_value_norm_ratio", "value_top_eigenvalue"
    METRICS = (RATIO, TOP)

    def forget(self) -> None:
        super().forget()
        self._moments_NN: dict[int, Tensor] = {}

    def look(self, block: Block, seen: Seen) -> bool:
        values_BHSK = None if seen.values is None else seen.values()
        if values_BHSK is None:
            return False
        batch, _, keys, _ = values_BHSK.shape
        valid_BS = self._padding.valid(block.stack, batch, keys)
        if valid_BS is None:
            valid_BS = torch.ones(batch, keys, dtype=torch.bool, device=values_BHSK.device)
        if self.own.of("values"):
            self.own.see("values", block.number, *with_padding(values_BHSK, valid_BS))
        if self.RATIO in self.wanted:
            ratio_B = first_ratio(value_lengths(values_BHSK, valid_BS), valid_BS)
            self._of_layers[block.number] = counted(self.RATIO, ratio_B)
        if self.TOP in self.wanted:
            tokens_N, is_token_N = evenly_spread(valid_BS[0], MAX_TOKENS)
            values_ND = heads_side_by_side(values_BHSK[0].index_select(1, tokens_N))
            self._moments_NN[block.number] = second_moment(values_ND, is_token_N)
        return True

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        reading = Reading()
        if self.RATIO in sums:
            reading.layers[self.RATIO] = mean(sums, self.RATIO)
        if self._moments_NN:
            moments_LNN = stacked(self._moments_NN.get(layer) for layer in range(self._depth))
            finish = functools.partial(_top_eigenvalues, frozenset(self._moments_NN))
            reading.layers[self.TOP] = OnHost(moments_LNN, finish)
        return reading


def _top_eigenvalues(measured: frozenset[int], moments_LNN: Tensor) -> Tensor:
    """On the host: NaN for layers that were not measured, whose moments are zeros here."""
    is_measured_L = torch.tensor([layer in measured for layer in range(len(moments_LNN))])
    return torch.where(is_measured_L, top_eigenvalues(moments_LNN), torch.nan)
