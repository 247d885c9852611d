"""Which sequences are in a batch, and whether it brings anything new. Axes: B sequences, N elements of each."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

__all__ = ["distinct_inputs", "input_overlap", "sequence_ids"]

MAX_SEQUENCES = 256
MAX_ELEMENTS = 4096
"""Number of elements of each tensor of a sequence that are hashed, evenly spread: all of a text, a part of an image."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GOLDEN, MIXING = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64
"""Odd constants of splitmix64, as signed numbers."""


def input_overlap(batch: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """Return the fraction of the sequences of a batch that are also in another batch.

    mean over sequences of [hash of the sequence is a hash of `before`]                    (tsemon)

    Each batch is a list of tensors (B, ...) of any dtype: sequence i is entry i of all of them. If there are more than
    256 sequences, the first 256 count. Returns a scalar, from 0 to 1. Hashes have 53 bits: one sequence in 2^53 / B is taken
    for another.
    """
    ids, known = (sequence_ids([tensor[:MAX_SEQUENCES] for tensor in tensors]).tolist() for tensors in (batch, before))
    return torch.tensor(overlap(ids, known))


def distinct_inputs(batch: Sequence[Tensor]) -> Tensor:
    """Return the number of different sequences in a batch.

    |{hash of sequence 1, ..., hash of sequence B}|                                        (tsemon)

    `batch` is a list of tensors as in `input_overlap`, and the first 256 sequences count. Returns a scalar, from 1 to 256;
    NaN for a single sequence.
    """
    ids = sequence_ids([tensor[:MAX_SEQUENCES] for tensor in batch]).tolist()
    return torch.tensor(len(set(ids)) if len(ids) > 1 else math.nan)


def overlap(ids: Sequence[int], before: Collection[int]) -> float:
    """The fraction of the sequences that are in `before`."""
    return sum(known in before for known in ids) / len(ids)


def sequence_ids(batch: Sequence[Tensor]) -> Tensor:
    """Return the id of each sequence of a batch, as in the metrics `sequence_id_1` to `sequence_id_4`.

    53 bits of the sum over elements of (bits of the element x odd number of its place)    (tsemon)

    `batch` is the list of the tensors (B, ...) that the model is given, in the order of its call. Sequence i is entry i of
    all of them, so equal texts with different padding differ. Returns (B,) integers from 0 to 2^53 - 1. Among n
    sequences, n^2 / 2^54 pairs have the same id by chance.
    """
    tensors, device = list(batch), batch[0].device
    sums_B = torch.zeros(tensors[0].shape[0], dtype=torch.int64, device=device)
    for tensor in tensors:
        rows_BN = tensor.detach().flatten(1) if tensor.ndim > 1 else tensor.detach()[:, None]
        rows_BN = rows_BN[:, :: -(-rows_BN.shape[1] // MAX_ELEMENTS)].contiguous()
        bits_BN = rows_BN.view(BITS[rows_BN.dtype.itemsize]).to(device, torch.int64, non_blocking=True)
        places_N = _odd_numbers(rows_BN.shape[1], device)
        sums_B = sums_B * MIXING + (bits_BN * places_N).sum(dim=1)
    mixed_B = (sums_B ^ (sums_B >> 32)) * GOLDEN
    return (mixed_B >> 11) & (2**53 - 1)


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """One for each place, without a pattern: no random state is drawn from."""
    places_N = torch.arange(1, count + 1, device=device) * GOLDEN
    return ((places_N ^ (places_N >> 29)) * MIXING) | 1
