"""Listen to what the model is given: whether the loader brings anything new.

Axes: B sequences, N elements of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.probes.held import Inputs
from tsemon.probes.part import OnHost, Part, Reading

MAX_SEQUENCES = 256
MAX_ELEMENTS = 4096
"""Of each tensor of a sequence so many are looked at, evenly spread: all of a text, a part of an image."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GOLDEN, MIXING = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64
"""Odd constants of splitmix64, as signed numbers."""


class InputProbe(Part):
    """Which sequences of the batch were in the batch of the sample before.

    A sequence is an entry along the first axis of the inputs, of all tensors together that have this axis. It is known
    again by a hash of 24 bits, taken on the device; hashes are compared on the exporter's thread.
    """

    METRICS = ("input_overlap",)

    def __init__(self) -> None:
        self._hashes_B: Tensor | None = None
        self._is_of_training = False
        self._hashes_before: set[float] | None = None
        self._why_missing: str | None = None

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the inputs of a forward pass. The first in train mode counts, or else the first."""
        if self._is_of_training or (self._hashes_B is not None and not module.training):
            return
        self._is_of_training = module.training
        tensors = list(_by_sequence(Inputs(args, kwargs)))
        self._hashes_B = _hashes(tensors) if tensors else None
        self._why_missing = f"{type(module).__name__} was given no tensor with an axis of sequences"

    def forget(self) -> None:
        self._hashes_B, self._is_of_training, self._why_missing = None, False, None

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if self._hashes_B is None:
            return Reading()
        return Reading(scalars={"input_overlap": OnHost(self._hashes_B, self._overlap)})

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if self._hashes_B is not None:
            return {}
        return {"input_overlap": self._why_missing or f"the model's inputs were not seen: {why_unseen}"}

    def _overlap(self, hashes_B: Tensor) -> Tensor:
        """Called in the order of samples. NaN in the first, which has none before it."""
        hashes = hashes_B.tolist()
        before, self._hashes_before = self._hashes_before, set(hashes)
        if before is None:
            return torch.tensor(torch.nan)
        return torch.tensor(sum(known in before for known in hashes) / len(hashes))


def _by_sequence(inputs: Inputs) -> list[Tensor]:
    """The tensors that have an entry for each sequence: their first axis is that of the first tensor of several axes."""
    readable = [tensor for tensor in inputs.tensors if _is_readable(tensor)]
    size = next((tensor.shape[0] for tensor in readable if tensor.ndim > 1), None)
    return [tensor for tensor in readable if tensor.ndim and tensor.shape[0] == size and tensor.numel()]


def _is_readable(tensor: Tensor) -> bool:
    is_whole = not hasattr(tensor, "to_local") and not tensor.is_nested
    return is_whole and tensor.layout == torch.strided and tensor.dtype.itemsize in BITS


def _hashes(tensors: list[Tensor]) -> Tensor:
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
