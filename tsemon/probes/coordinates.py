"""A few coordinates of each block's parameters, kept from sample to sample, to see in which direction they go."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tsemon.measures.parameters import joined

MAX_COORDINATES = 65_536
"""Kept per group of parameters: 256 KiB. A cosine estimated from so many misses by 0.004 (sd) at the most."""


FEW = 4
"""Up to this stride, a copy of the whole vector is small enough to be picked from."""


class Products(NamedTuple):
    """Of the vector now and the one of the sample before, scaled up from coordinates to the whole, in float64."""

    dot: Tensor
    now: Tensor
    """|now|^2"""
    before: Tensor
    """|before|^2"""


class Coordinates:
    """Evenly strided coordinates of vectors that are seen once a sample."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[list[Tensor], Tensor]] = {}
        self._before: dict[Hashable, tuple[list[Tensor], Tensor]] = {}

    def begin(self) -> None:
        """A sample begins. Vectors that are seen twice in it are compared with the earlier sample both times."""
        self._before = dict(self._kept)

    def compare(self, key: Hashable, tensors: list[Tensor], shares: Sequence[float], stride: int) -> Products | None:
        """Keep the coordinates of one vector, and compare them with those kept under the same key before."""
        now = _pick(tensors, shares, stride)
        wide = [x.double() for x in now]
        now_now = _dot(wide, wide) * stride
        before, before_before = self._before.get(key, ([], now_now))
        self._kept[key] = now, now_now
        if [x.shape for x in before] != [x.shape for x in now]:
            return None
        return Products(_dot([x.double() for x in before], wide) * stride, now_now, before_before)


def stride_of(tensors: Sequence[Tensor]) -> int:
    """So many entries lie between two coordinates. It shares no factor with a row: that would pick the same columns."""
    stride = max(1, math.ceil(sum(t.numel() for t in tensors) / MAX_COORDINATES))
    while any(math.gcd(stride, t.shape[-1]) > 1 for t in tensors if t.ndim > 1 and t.numel()):
        stride += 1
    return stride


def _pick(tensors: list[Tensor], shares: Sequence[float], stride: int) -> list[Tensor]:
    """One vector per device."""
    first = tensors[0]
    is_uniform = len(tensors) > 1 and all(t.device == first.device and t.dtype == first.dtype for t in tensors)
    if is_uniform and stride <= FEW and {*shares} == {1.0}:
        return [torch._C._nn.flatten_dense_tensors(tensors)[::stride].float().contiguous()]
    picked: dict[torch.device, list[Tensor]] = {}
    position = 0
    for tensor, share in zip(tensors, shares, strict=True):
        values = tensor.reshape(-1)[-position % stride :: stride]
        values = values * math.sqrt(share) if share != 1 else values  # in a product of two it is whole
        picked.setdefault(tensor.device, []).append(values.float())
        position += tensor.numel()
    return [torch.cat(values) for values in picked.values()]


def _dot(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    found = [torch.dot(x, y) for x, y in zip(xs, ys, strict=True)]
    return found[0] if len(found) == 1 else joined(found).sum()
