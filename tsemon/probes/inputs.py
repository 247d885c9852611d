"""Listen to what the model is given: whether the loader brings anything new. Axes: B sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.measures.inputs import BITS, hashes, overlap
from tsemon.probes.held import Inputs
from tsemon.probes.part import NOT_CALLED, Part
from tsemon.probes.reading import OnHost, Reading


class InputProbe(Part):
    """Which sequences of the batch were in the batch of the sample before.

    A sequence is an entry along the first axis of the inputs, of all tensors together that have this axis. It is known
    again by a hash of 24 bits, taken on the device; hashes are compared on the exporter's thread.
    """

    METRICS = ("input_overlap",)

    _hashes_before: set[float] | None = None

    def forget(self) -> None:
        super().forget()
        self._hashes_B: Tensor | None = None
        self._is_of_training = False
        self._why_missing: str | None = None

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the inputs of a forward pass. The first in train mode counts, or else the first."""
        if self._is_of_training or (self._hashes_B is not None and not module.training):
            return
        self._is_of_training = module.training
        tensors = list(_by_sequence(Inputs(args, kwargs)))
        self._hashes_B = hashes(tensors) if tensors else None
        self._why_missing = f"{type(module).__name__} was given no tensor with an axis of sequences"

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if self._hashes_B is None:
            return Reading()
        return Reading(scalars={"input_overlap": OnHost(self._hashes_B, self._overlap)})

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if self._hashes_B is not None:
            return {}
        return {"input_overlap": self._why_missing or f"the model's inputs were not seen: {why_unseen or NOT_CALLED}"}

    def _overlap(self, hashes_B: Tensor) -> Tensor:
        """Called in the order of samples. NaN in the first, which has none before it."""
        own = hashes_B.tolist()
        before, self._hashes_before = self._hashes_before, set(own)
        return torch.tensor(torch.nan) if before is None else overlap(own, before)


def _by_sequence(inputs: Inputs) -> list[Tensor]:
    """The tensors that have an entry for each sequence: their first axis is that of the first tensor of several axes."""
    readable = [tensor for tensor in inputs.tensors if _is_readable(tensor)]
    size = next((tensor.shape[0] for tensor in readable if tensor.ndim > 1), None)
    return [tensor for tensor in readable if tensor.ndim and tensor.shape[0] == size and tensor.numel()]


def _is_readable(tensor: Tensor) -> bool:
    is_whole = not hasattr(tensor, "to_local") and not tensor.is_nested
    return is_whole and tensor.layout == torch.strided and tensor.dtype.itemsize in BITS
