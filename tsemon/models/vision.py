"""A small vision transformer for classification.

Axes: `B` batch, `C` channels, `S` image side, `T` tokens (one class token, then the patches), `D` width, `K` classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import presets
from tsemon.models.blocks import BlockConfig, last_norm, stack
from tsemon.models.presets import OfPreset, Presets, Sizes


@dataclass(frozen=True, kw_only=True)
class VisionTransformerConfig(BlockConfig, Presets):
    PRESETS: ClassVar[Mapping[str, Sizes]] = presets.VISION
    image_size: int
    """S, in pixels."""
    patch: int
    """Side of a patch, in pixels."""
    channels: int
    num_classes: int
    depth: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patch < 1 or self.image_size < 1 or self.image_size % self.patch:
            raise InvalidArgument(
                f"image_size must be a positive multiple of patch, got image_size {self.image_size} and patch {self.patch}"
            )
        if self.channels < 1 or self.num_classes < 1:
            raise InvalidArgument(
                "channels and num_classes must be at least 1, "
                f"got channels {self.channels} and num_classes {self.num_classes}"
            )


class VisionTransformer(OfPreset, nn.Module):
    """ViT, as in Section 3.3 of Classic Transformers (arXiv 2312.06182).

    Takes images (B, C, S, S), returns logits (B, K), read from the class token: at tau = 1 a mean over tokens is zero.
    Raises InvalidArgument for sizes that do not fit together, ShapeError when the images have another size.
    """

    CONFIG = VisionTransformerConfig

    def __init__(self, config: VisionTransformerConfig) -> None:
        super().__init__()
        self.config = config
        num_patches = (config.image_size // config.patch) ** 2
        self.embed = nn.Linear(config.channels * config.patch**2, config.width)
        # Standard normal, as nn.Embedding starts.
        self.class_token = nn.Parameter(torch.randn(config.width))
        self.positions = nn.Parameter(torch.randn(1 + num_patches, config.width))
        self.blocks = stack(config, config.depth)
        self.norm = last_norm(config)
        self.head = nn.Linear(config.width, config.num_classes)

    def forward(self, images_BCSS: Tensor) -> Tensor:
        size = self.config.image_size
        if tuple(images_BCSS.shape[1:]) != (self.config.channels, size, size):
            expected = f"({self.config.channels}, {size}, {size})"
            raise ShapeError(f"expected images (batch, *{expected}), got {tuple(images_BCSS.shape)}")
        patches_BTD = self.embed(self._patches(images_BCSS))
        class_B1D = self.class_token.expand(len(images_BCSS), 1, -1)
        x_BTD = torch.cat([class_B1D, patches_BTD], dim=1) + self.positions
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BK: Tensor = self.head(self.norm(x_BTD[:, 0]))
        return logits_BK

    def _patches(self, images_BCSS: Tensor) -> Tensor:
        """(B, patches, C * patch * patch), patches row by row."""
        patch = self.config.patch
        rows = images_BCSS.unfold(2, patch, patch).unfold(3, patch, patch)
        return rows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
