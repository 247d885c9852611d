"""What the parameters of two checkpoints say of each other, in sums over groups of parameters.

Axes: N entries of a tensor, seen as one flat vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tsemon.measures.parameters import cosine_of, dots, norm_of, squares
from tsemon.probes.groups import EMBEDDING, HEAD, OTHER
from tsemon.tools.scanning.grouping import Groups
from tsemon.tools.scanning.opening import Weights

PIECE = 2**20
"""Entries that are widened to float64 at a time: what is summed takes a few times 8 MiB, not a few times the tensor."""


@dataclass(slots=True)
class Sums:
    """Of one group: w are its parameters at a checkpoint, v those at the checkpoint before, in float64."""

    w_w: float = 0.0
    v_v: float = 0.0
    w_v: float = 0.0
    d_d: float = 0.0
    """d = w - v, subtracted entry by entry: of nearly equal sums little would be left."""
    d_v: float = 0.0
    num_nonfinite: int = 0

    def __iadd__(self, other: Sums) -> Sums:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    @property
    def norm(self) -> float:
        return _finished(norm_of, self.w_w)

    @property
    def distance(self) -> float:
        return _finished(norm_of, self.d_d)

    @property
    def direction_cosine(self) -> float:
        return _finished(cosine_of, self.w_v, self.w_w, self.v_v)

    @property
    def alignment(self) -> float:
        return _finished(cosine_of, self.d_v, self.d_d, self.v_v)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One checkpoint beside the one before it."""

    blocks: list[Sums | None]
    """None of a block without parameters of its own: it shares those of an earlier one."""
    ends: dict[int, Sums] = field(default_factory=dict)
    """Of EMBEDDING, HEAD and OTHER, where there are any."""

    @property
    def total(self) -> Sums:
        """Over all but the embeddings, as the paper advises (arXiv 2010.09697, Appendix A)."""
        total = Sums()
        for sums in (*self.blocks, self.ends.get(OTHER), self.ends.get(HEAD)):
            total += sums or Sums()
        return total

    @property
    def embedding(self) -> Sums | None:
        return self.ends.get(EMBEDDING)

    @property
    def head(self) -> Sums | None:
        return self.ends.get(HEAD)


def compare(groups: Groups, weights: Weights, before: Weights | None) -> Comparison:
    """Read both checkpoints once, tensor by tensor. Without one before, what needs it is NaN."""
    found: dict[int, Sums] = {}
    for group, names in groups.members.items():
        sums = found[group] = Sums()
        for name in names:
            sums += _sums(weights.tensor(name), None if before is None else before.tensor(name))
    blocks = [found.pop(number, None) for number in range(len(groups.blocks))]
    return Comparison(blocks, found)


def _sums(w: Tensor, v: Tensor | None) -> Sums:
    sums = Sums() if v is not None else Sums(v_v=math.nan, w_v=math.nan, d_d=math.nan, d_v=math.nan)
    w_N = w.detach().reshape(-1)
    v_N = None if v is None else v.detach().reshape(-1)
    for start in range(0, w_N.numel(), PIECE):
        w_P = w_N[start : start + PIECE].double()
        sums.num_nonfinite += w_P.numel() - int(w_P.isfinite().sum())
        sums.w_w += squares([w_P]).item()
        if v_N is not None:
            v_P = v_N[start : start + PIECE].double()
            d_P = w_P - v_P
            v_v, d_d = squares([v_P, d_P]).tolist()
            w_v, d_v = dots([w_P, d_P], [v_P, v_P]).tolist()
            sums += Sums(v_v=v_v, d_d=d_d, w_v=w_v, d_v=d_v)
    return sums


def _finished(finish: Callable[..., Tensor], *sums: float) -> float:
    return finish(*torch.tensor(sums, dtype=torch.float64)).item()
