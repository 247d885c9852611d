"""Whether a batch brings anything new. Axes: B sequences, N elements of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

__all__ = ["input_overlap"]

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
    256 sequences, the first 256 count. Returns a scalar, from 0 to 1. Hashes have 24 bits: one sequence in 2^24 / B is taken
    for another.
    """
    return overlap(hashes(batch).tolist(), hashes(before).tolist())


def overlap(hashes: Sequence[float], before: Collection[float]) -> Tensor:
    """The fraction of the hashes that are in `before`."""
    return torch.tensor(sum(known in before for known in hashes) / len(hashes))


def hashes(tensors: Sequence[Tensor]) -> Tensor:
    """24 bits of a sum over elements of (bits of the element x odd number of its place), which float32 holds exactly."""
    device = tensors[0].device
    sums_B = torch.zeros(min(tensors[0].shape[0], MAX_SEQUENCES), dtype=torch.int64, device=device)
    for tensor in tensors:
        rows_BN = (
            tensor.detach()[:MAX_SEQUENCES].flatten(1) if tensor.ndim > 1 else tensor.detach()[:MAX_SEQUENCES, None]
        )
        rows_BN = rows_BN[:, :: -(-rows_BN.shape[1] // MAX_ELEMENTS)].contiguous()
        bits_BN = rows_BN.view(BITS[rows_BN.dtype.itemsize]).to(device, torch.int64, non_blocking=True)
        places_N = _odd_numbers(rows_BN.shape[1], device)
        sums_B = sums_B * MIXING + (bits_BN * places_N).sum(dim=1)
    mixed_B = (sums_B ^ (sums_B >> 32)) * GOLDEN
    return ((mixed_B >> 40) & 0xFFFFFF).float()


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """One for each place, without a pattern: no random state is drawn from."""
    places_N = torch.arange(1, count + 1, device=device) * GOLDEN
    return ((places_N ^ (places_N >> 29)) * MIXING) | 1
