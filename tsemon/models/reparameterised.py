"""Self-attention whose value and output weights have eigenvalues of a chosen sign.

Axes: `B` batch, `T` tokens, `D` width, `H` heads, `K` width of a head.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models.attention import AttentionPath, attend, check_heads
from tsemon.models.cache import Cache

Reparameterisation = Literal["sharpening", "smoothing"]
RANGES = {"sharpening": (-1.0, 0.0), "smoothing": (0.0, 1.0)}
"""To what psi is clipped."""


class ReparameterisedWeights(nn.Module):
    """W_V W_proj = V_H L V_H^-1 with L = diag(clip(psi, range)): W_V = V_H and W_proj = L V_H^-1.

    Transformer Oversmoothing (Section 4; the footnote of Appendix C prints the transpose for the inverse). With eigenvalues
    in [-1, 0] the theory says that attention sharpens, in [0, 1] that it smooths. V_H starts by He's initialisation, psi
    normal with variance 0.1. Gradients go through the inverse, which is taken in float32 or wider.
    Raises InvalidArgument for another kind than these two.
    """

    def __init__(self, width: int, kind: Reparameterisation) -> None:
        super().__init__()
        if kind not in RANGES:
            raise InvalidArgument(f"reparameterisation must be 'sharpening' or 'smoothing', got {kind!r}")
        self.range = RANGES[kind]
        self.basis = nn.Parameter(torch.empty(width, width))  # V_H
        nn.init.kaiming_normal_(self.basis)
        self.psi = nn.Parameter(math.sqrt(0.1) * torch.randn(width))

    def eigenvalues_D(self) -> Tensor:
        return self.psi.clamp(*self.range)

    def output_weight_DD(self) -> Tensor:
        """L V_H^-1."""
        wide = torch.promote_types(self.basis.dtype, torch.float32)
        weight_DD: Tensor = self.eigenvalues_D().to(wide)[:, None] * torch.linalg.inv(self.basis.to(wide))
        return weight_DD.to(self.basis.dtype)


class ReparameterisedAttention(ReparameterisedWeights):
    """Multi-head self-attention with values and output by `ReparameterisedWeights`, neither with a bias.

    Takes and returns (B, T, D). Raises InvalidArgument unless `heads` divides `width`, ShapeError when the input has
    another width.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool = False,
        *,
        scale: float | None = None,
        path: AttentionPath = "sdpa",
        kind: Reparameterisation,
    ) -> None:
        check_heads(width, heads)
        super().__init__(width, kind)
        self.heads = heads
        self.causal = causal
        self.scale = scale
        self.path = path
        self.to_query_key = nn.Linear(width, 2 * width)

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        if x_BTD.ndim != 3 or x_BTD.shape[2] != len(self.psi):
            raise ShapeError(f"expected (batch, tokens, {len(self.psi)}), got {tuple(x_BTD.shape)}")
        query, key = self._heads(self.to_query_key(x_BTD)).chunk(2, dim=1)
        value = self._heads(x_BTD @ self.basis)
        if cache is not None:
            key, value = cache.append(self, key=key, value=value)
        mixed_BHTK = attend(query, key, value, causal=self.causal, path=self.path, scale=self.scale)
        y_BTD: Tensor = mixed_BHTK.transpose(1, 2).flatten(2) @ self.output_weight_DD()
        return y_BTD

    def _heads(self, x_BTD: Tensor) -> Tensor:
        size = len(self.psi) // self.heads
        return x_BTD.view(*x_BTD.shape[:2], x_BTD.shape[2] // size, size).transpose(1, 2)
