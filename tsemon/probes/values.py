"""What attention's values look like, read where the weights meet them: after any mixing between layers.

Axes: B samples, H heads (of keys), S keys, K width of a head, N the shorter side of (S, H K), L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.measures.choosing import evenly_spread
from tsemon.measures.sequences import ROWS, Sequences
from tsemon.measures.sums import Partials, counted, mean
from tsemon.measures.values import heads_side_by_side, second_moment, top_eigenvalues, value_lengths
from tsemon.probes.deferred import Deferred
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
    SUBJECT = "values were not seen"

    def forget(self) -> None:
        super().forget()
        self._lengths = Deferred(_first_ratios)
        self._moments_NN: dict[int, Tensor] = {}

    def drop(self, block: Block) -> None:
        super().drop(block)
        self._lengths.drop(block.number)
        self._moments_NN.pop(block.number, None)

    def look(self, block: Block, seen: Seen) -> bool:
        values_BHSK = None if seen.values is None else seen.values()
        if values_BHSK is None or not values_BHSK.numel():
            return False
        batch, _, keys, _ = values_BHSK.shape
        sequences = self._packing.of_others(block.stack, batch, keys) or ROWS
        valid_BS = sequences.valid_BT
        if self.own.of("values"):
            self.own.see("values", block.number, *with_padding(values_BHSK, valid_BS))
        if self.RATIO in self.wanted:
            length_BS = value_lengths(values_BHSK, valid_BS)
            self._lengths.put(block.number, (length_BS,), sequences, key=id(sequences))
        if self.TOP in self.wanted:
            first_S = sequences.of_first()
            if first_S is None:
                first_S = torch.ones(keys, dtype=torch.bool, device=values_BHSK.device)
            tokens_N, is_token_N = evenly_spread(first_S, MAX_TOKENS)
            values_ND = heads_side_by_side(values_BHSK[0].index_select(1, tokens_N))
            self._moments_NN[block.number] = second_moment(values_ND, is_token_N)
        return True

    def why_not_in(self, block: Block) -> str:
        if block.number not in self._reported:
            return super().why_not_in(block)
        return (
            f"{type(block.attention).__name__} made weights with a softmax, and multiplied no tensor of values with them by "
            "matmul, bmm or einsum"
        )

    def collect(self) -> Partials:
        return self._lengths.collect(self._depth)

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        reading = Reading()
        if self.RATIO in sums:
            reading.layers[self.RATIO] = mean(sums, self.RATIO)
        if self._moments_NN:
            moments_LNN = stacked(self._moments_NN.get(layer) for layer in range(self._depth))
            finish = functools.partial(_top_eigenvalues, frozenset(self._moments_NN))
            reading.layers[self.TOP] = OnHost(moments_LNN, finish)
        return reading


def _first_ratios(lengths: tuple[Tensor, ...], sequences: Sequences) -> Partials:
    (length_NBS,) = lengths
    if sequences.documents_BT is None:
        return counted(ValueProbe.RATIO, sequences.first_ratio(length_NBS))
    return counted(ValueProbe.RATIO, torch.stack([sequences.first_ratio(length_BS) for length_BS in length_NBS]))


def _top_eigenvalues(measured: frozenset[int], moments_LNN: Tensor) -> Tensor:
    """On the host: NaN for layers that were not measured, whose moments are zeros here."""
    is_measured_L = torch.tensor([layer in measured for layer in range(len(moments_LNN))])
    return torch.where(is_measured_L, top_eigenvalues(moments_LNN), torch.nan)
