"""Which parameters get a gradient, but are in no optimizer and stand still."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tsemon.probes.groups import local

MAX_ENTRIES = 512
"""Entries of each parameter that are compared with the sample before. An optimizer moves nearly all of them."""


class Untrained:
    """Compares parameters with themselves a sample before.

    A parameter that none of `attach`'s optimizers has may be trained by another one. Then it moves.
    """

    def __init__(self) -> None:
        self._before: tuple[list[tuple[int, int]], Tensor] | None = None
        """For each parameter its id and its number of entries, and the entries of all."""

    def count(self, params: Sequence[nn.Parameter]) -> Tensor:
        """Return how many of these have not moved since the last call. NaN if the last call was not of the same ones."""
        picked = [_pick(local(p)) for p in params]
        if not picked:
            self._before = None
            return torch.zeros((), device="cpu")
        device = next((values.device for values in picked if values.device.type != "cpu"), picked[0].device)
        sizes = [(id(p), values.numel()) for p, values in zip(params, picked, strict=True)]
        now = torch.cat([values.to(device, non_blocking=True) for values in picked])
        before, self._before = self._before, (sizes, now)
        if before is None or before[0] != sizes:
            return torch.full((), torch.nan, device=device)
        owner = torch.repeat_interleave(torch.tensor([size for _, size in sizes], device="cpu"))
        has_moved = (now != before[1]).float()
        num_moved_P = torch.zeros(len(sizes), device=device).index_add_(
            0, owner.to(device, non_blocking=True), has_moved
        )
        # Of a parameter without entries, such as a shard that is empty now, nothing is known.
        num_empty = sum(size == 0 for _, size in sizes)
        return (num_moved_P == 0).sum().float() - num_empty


def _pick(values: Tensor) -> Tensor:
    in_memory = values.detach().permute(sorted(range(values.ndim), key=values.stride, reverse=True))
    return in_memory.reshape(-1)[:: max(math.ceil(values.numel() / MAX_ENTRIES), 1)]
