"""A small vision transformer for classification.

Axes: `B` batch, `C` channels, `S` image side, `T` tokens (one class token, then the patches), `D` width, `K` classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models.blocks import stack_of_blocks


class VisionTransformer(nn.Module):
    """ViT with post-norm blocks, as in Section 3.3 of Classic Transformers (arXiv 2312.06182).

    Takes images (B, C, S, S), returns logits (B, K), read from the class token: at tau = 1 a mean over tokens is zero.
    `tau=None` is the classic model, a number from 0 to 1 its de-escalated twin with the same parameters.
    Raises InvalidArgument for sizes that do not fit together, ShapeError when the images have another size.
    """

    def __init__(
        self,
        image_size: int,
        patch: int,
        channels: int,
        num_classes: int,
        depth: int,
        width: int,
        heads: int,
        ffn: int,
        tau: float | None = None,
    ) -> None:
        super().__init__()
        if patch < 1 or image_size < 1 or image_size % patch:
            raise InvalidArgument(
                f"image_size must be a positive multiple of patch, got image_size {image_size} and patch {patch}"
            )
        self.image_shape = (channels, image_size, image_size)
        self.patch = patch
        self.embed = nn.Linear(channels * patch**2, width)
        # Standard normal, as nn.Embedding starts.
        self.class_token = nn.Parameter(torch.randn(width))
        self.positions = nn.Parameter(torch.randn(1 + (image_size // patch) ** 2, width))
        self.blocks = stack_of_blocks(depth, width, heads, ffn, tau, causal=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images_BCSS: Tensor) -> Tensor:
        if tuple(images_BCSS.shape[1:]) != self.image_shape:
            raise ShapeError(f"expected images (batch, *{self.image_shape}), got {tuple(images_BCSS.shape)}")
        patches_BTD = self.embed(self._patches(images_BCSS))
        class_B1D = self.class_token.expand(len(images_BCSS), 1, -1)
        x_BTD = torch.cat([class_B1D, patches_BTD], dim=1) + self.positions
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BK: Tensor = self.head(x_BTD[:, 0])
        return logits_BK

    def _patches(self, images_BCSS: Tensor) -> Tensor:
        """(B, patches, C * patch * patch), patches row by row."""
        rows = images_BCSS.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        return rows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
