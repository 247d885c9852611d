"""The 'repeating' models of the oversmoothing theory: one layer, with one fixed attention, applied again and again.

Axes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import presets
from tsemon.models.presets import OfPreset, Presets, Sizes
from tsemon.models.reparameterised import ReparameterisationConfig, ReparameterisedWeights


@dataclass(frozen=True, kw_only=True)
class RepeatingTransformerConfig(ReparameterisationConfig, Presets):
    PRESETS: ClassVar[Mapping[str, Sizes]] = presets.REPEATING
    depth: int
    """How often the layer is applied."""
    width: int
    """D"""
    norm: Literal["post", "pre"] | None = None
    """Where the norm stands: after the sum, before attention, or nowhere."""
    gamma: Literal["positive", "negative"] = "positive"
    """Sign of the norm's weights. Their magnitudes are those of normal random numbers, and are not trained."""
    orthogonal: bool = False
    """Start V_H as an orthogonal matrix, and not by He's initialisation. H is then symmetric, and the norm's weights, which
    stand between A X and H, scale its eigenvalues but leave (or turn, where negative) the sign of them all."""

    def __post_init__(self) -> None:
        self.check_reparameterisation()
        if self.depth < 1 or self.width < 1:
            raise InvalidArgument(f"depth and width must be at least 1, got depth {self.depth} and width {self.width}")
        if self.norm not in ("post", "pre", None) or self.gamma not in ("positive", "negative"):
            raise InvalidArgument(
                "norm must be 'post', 'pre' or None and gamma 'positive' or 'negative', "
                f"got norm {self.norm!r} and gamma {self.gamma!r}"
            )


class RepeatingTransformer(OfPreset, nn.Module):
    """Eq. 2 of Transformer Oversmoothing with the same A and H in every layer (its Figure 4).

    Takes and returns hidden states (B, T, D). A is computed from the input by Eq. 1, once, or handed in as `weights_BTT`:
    positive rows that sum to one. H has one head and no biases; its eigenvalues are those of `ReparameterisedWeights`.
    Corollary 3 needs an A whose eigenvalues are real, such as a symmetric one (those of a softmax may be complex), and an H
    with no eigenvalue of 0; half of them start there, where psi is clipped.
    Raises InvalidArgument for sizes below one, ShapeError when the input has another width.
    """

    CONFIG = RepeatingTransformerConfig

    def __init__(self, config: RepeatingTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.to_query_key = nn.Linear(config.width, 2 * config.width, bias=False)
        self.blocks = nn.ModuleList([RepeatingLayer(config)] * config.depth)

    def forward(self, x_BTD: Tensor, weights_BTT: Tensor | None = None) -> Tensor:
        if x_BTD.ndim != 3 or x_BTD.shape[2] != self.config.width:
            raise ShapeError(f"expected (batch, tokens, {self.config.width}), got {tuple(x_BTD.shape)}")
        weights_BTT = self.weights_BTT(x_BTD) if weights_BTT is None else weights_BTT
        for block in self.blocks:
            x_BTD = block(x_BTD, weights_BTT)
        return x_BTD

    def weights_BTT(self, x_BTD: Tensor) -> Tensor:
        """A = softmax(X W_Q W_K' X' / sqrt(D)), Eq. 1."""
        query_BTD, key_BTD = self.to_query_key(x_BTD).chunk(2, dim=2)
        return torch.softmax(query_BTD @ key_BTD.transpose(1, 2) / math.sqrt(self.config.width), dim=2)


class RepeatingLayer(nn.Module):
    def __init__(self, config: RepeatingTransformerConfig) -> None:
        super().__init__()
        self.norm_before = _fixed_norm(config) if config.norm == "pre" else nn.Identity()
        self.attention = FixedAttention(config.width, config)
        if config.orthogonal:
            nn.init.orthogonal_(self.attention.basis)
        self.norm_after = _fixed_norm(config) if config.norm == "post" else nn.Identity()

    def forward(self, x_BTD: Tensor, weights_BTT: Tensor) -> Tensor:
        y_BTD: Tensor = self.norm_after(x_BTD + self.attention(self.norm_before(x_BTD), weights_BTT))  # Eq. 2
        return y_BTD


class FixedAttention(ReparameterisedWeights):
    """A X W_V W_proj with A as it is given."""

    def forward(self, x_BTD: Tensor, weights_BTT: Tensor) -> Tensor:
        return weights_BTT @ (x_BTD @ self.basis) @ self.output_weight_DD()


def _fixed_norm(config: RepeatingTransformerConfig) -> nn.LayerNorm:
    norm = nn.LayerNorm(config.width, bias=False).requires_grad_(False)
    gamma_D = torch.randn(config.width).abs()
    norm.weight.copy_(gamma_D if config.gamma == "positive" else -gamma_D)
    return norm
