"""Self-attention whose value and output weights have eigenvalues of a chosen sign.

Axes: `B` batch, `T` tokens, `D` width, `H` heads, `K` width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models.attention import AttentionPath, attend, check_heads
from tsemon.models.cache import Cache

Reparameterisation = Literal["sharpening", "smoothing"]
Projection = Literal["inverse", "transpose"]
RANGES: Mapping[Reparameterisation, tuple[float, float]] = {"sharpening": (-1.0, 0.0), "smoothing": (0.0, 1.0)}
"""The interval that psi is clipped to."""


@dataclass(frozen=True, kw_only=True)
class ReparameterisationConfig:
    """Rules for the eigenvalues of the value and output weights. `check_reparameterisation` raises InvalidArgument if they
    contradict each other."""

    reparameterisation: Reparameterisation | None = None
    """Clip psi to [-1, 0] (sharpening) or [0, 1] (smoothing); None leaves the weights free."""
    projection: Projection = "inverse"
    """`inverse`: W_proj = L V_H^-1, Section 4. `transpose`: W_proj = L V_H', which footnote 4 prints for several heads."""
    psi_clip: tuple[float, float] | None = None
    """Interval that psi is clipped to; None is [-1, 0] or [0, 1]."""
    psi_variance: float = 0.1
    """Variance of psi at the start."""

    def check_reparameterisation(self) -> None:
        kind, clip = self.reparameterisation, self.psi_clip
        if kind not in (None, *RANGES):
            raise InvalidArgument(f"expected a reparameterisation 'sharpening' or 'smoothing', got {kind!r}")
        if self.projection not in get_args(Projection):
            raise InvalidArgument(f"projection must be one of {get_args(Projection)}, got {self.projection!r}")
        if not _is_number(self.psi_variance) or not 0 < self.psi_variance < math.inf:
            raise InvalidArgument(f"psi_variance must be positive and finite, got {self.psi_variance!r}")
        if kind is None and (self.projection, clip, self.psi_variance) != ("inverse", None, 0.1):
            raise InvalidArgument("projection, psi_clip and psi_variance need a reparameterisation, got none")
        if clip is None or kind is None:
            return
        is_pair = isinstance(clip, tuple | list) and len(clip) == 2 and all(map(_is_number, clip))
        if not is_pair or not -math.inf < clip[0] < clip[1] < math.inf:
            raise InvalidArgument(f"psi_clip must be two finite numbers, the smaller one first, got {clip!r}")
        if (clip[1] > 0) if kind == "sharpening" else (clip[0] < 0):
            sign = "at most 0" if kind == "sharpening" else "at least 0"
            raise InvalidArgument(f"a {kind} model needs eigenvalues of {sign}, got psi_clip={clip}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class ReparameterisedWeights(nn.Module):
    """W_V = V_H and W_proj = L V_H^-1 with L = diag(clip(psi, interval)), so that W_V W_proj has the eigenvalues L.

    Transformer Oversmoothing (Section 4). With eigenvalues in [-1, 0] the theory says that attention sharpens, in [0, 1]
    that it smooths. Footnote 4 prints W_proj = L V_H' for models with several heads: V_H L V_H' is symmetric and its
    eigenvalues have the signs of L (Sylvester's law of inertia), but their size depends on V_H and leaves the interval.
    V_H starts by He's initialisation. Gradients go through the inverse, which is computed in float32 or wider.
    Raises InvalidArgument if the config has no reparameterisation.
    """

    def __init__(self, width: int, config: ReparameterisationConfig) -> None:
        super().__init__()
        if config.reparameterisation is None:
            raise InvalidArgument("reparameterisation must be 'sharpening' or 'smoothing', got None")
        config.check_reparameterisation()
        self.range = config.psi_clip or RANGES[config.reparameterisation]
        self.projection = config.projection
        self.basis = nn.Parameter(torch.empty(width, width))  # V_H
        nn.init.kaiming_normal_(self.basis)
        self.psi = nn.Parameter(math.sqrt(config.psi_variance) * torch.randn(width))

    def clipped_psi_D(self) -> Tensor:
        """The diagonal of L: with the inverse, the eigenvalues of W_V W_proj."""
        return self.psi.clamp(*self.range)

    def output_weight_DD(self) -> Tensor:
        """L V_H^-1 or L V_H'."""
        if self.projection == "transpose":
            return self.clipped_psi_D()[:, None] * self.basis.T
        wide = torch.promote_types(self.basis.dtype, torch.float32)
        weight_DD: Tensor = self.clipped_psi_D().to(wide)[:, None] * torch.linalg.inv(self.basis.to(wide))
        return weight_DD.to(self.basis.dtype)

    def value_output_weights(self) -> tuple[Tensor, Tensor]:
        """W_V and W_proj as torch's Linear has them: (D, D) each, from a width to a width."""
        return self.basis.T, self.output_weight_DD().T


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
        config: ReparameterisationConfig,
    ) -> None:
        check_heads(width, heads)
        super().__init__(width, config)
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
