"""A vision transformer whose attention is made to sharpen, in one file to copy (Setting the Record Straight on Transformer
Oversmoothing, Section 4).

Its parameters have the names and sizes of
tsemon.models.VisionTransformer(norm="pre", reparameterisation="sharpening", projection="transpose").
Axes: B batch, C channels, S side of an image, T tokens, D width, H heads, K width of a head.
"""

import torch
from torch import nn
from torch.nn import functional as F


class SharpeningAttention(nn.Module):
    """W_V = V_H and W_proj = L V_H', L = clip(psi, [-1, 0]) (footnote 4): H = W_V W_proj has no positive eigenvalue.

    With L in [0, 1] attention smooths instead.
    """

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.basis = nn.Parameter(torch.empty(width, width))  # V_H
        nn.init.kaiming_normal_(self.basis)
        self.psi = nn.Parameter(0.1**0.5 * torch.randn(width))
        self.to_query_key = nn.Linear(width, 2 * width)

    def forward(self, x_BTD):
        query, key = (self._heads(part) for part in self.to_query_key(x_BTD).chunk(2, dim=2))
        mixed_BHTK = F.scaled_dot_product_attention(query, key, self._heads(x_BTD @ self.basis))
        project_DD = self.psi.clamp(-1, 0)[:, None] * self.basis.T
        return mixed_BHTK.transpose(1, 2).flatten(2) @ project_DD

    def _heads(self, x_BTD):
        return x_BTD.unflatten(2, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, width, ffn):
        super().__init__()
        self.expand, self.contract = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x_BTD):
        return self.contract(F.gelu(self.expand(x_BTD)))


class Block(nn.Module):
    def __init__(self, width, heads, ffn):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = SharpeningAttention(width, heads), FeedForward(width, ffn)

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.feed_forward(self.norm2(x_BTD))


class SharpeningTransformer(nn.Module):
    """Takes images (B, C, S, S), returns logits (B, classes)."""

    def __init__(self, *, image_size, patch, channels, num_classes, depth, width, heads, ffn):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(channels * patch**2, width)
        self.class_token = nn.Parameter(torch.randn(width))
        self.positions = nn.Parameter(torch.randn(1 + (image_size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads, ffn) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, images_BCSS):
        patches_BTD = F.unfold(images_BCSS, self.patch, stride=self.patch).transpose(1, 2)
        class_B1D = self.class_token.expand(len(images_BCSS), 1, -1)
        x_BTD = torch.cat([class_B1D, self.embed(patches_BTD)], dim=1) + self.positions
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD[:, 0]))
