"""Transformer blocks of the classic, post-norm architecture, and the one that holds token similarity down.

Axes: `B` batch, `T` tokens, `D` width, `H` heads, `F` hidden width of the feed-forward network.
Weights start as PyTorch's layers start them. Xavier's larger weights make a deep de-escalated model's gradient explode.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument, ShapeError


class SelfAttention(nn.Module):
    """Multi-head self-attention: P X W of Algorithm 1, with P = softmax(Q K' / sqrt(D / H)) for each head.

    Takes and returns (B, T, D). Where `causal`, token t sees tokens 0 to t.
    Raises InvalidArgument unless `heads` divides `width`, ShapeError when the input has another width.
    """

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        if heads < 1 or width < 1 or width % heads:
            raise InvalidArgument(
                f"width must be a positive multiple of heads, got width {width} and {heads} heads; "
                "choose a width that the number of heads divides"
            )
        self.heads = heads
        self.causal = causal
        self.to_query_key_value = nn.Linear(width, 3 * width)
        self.to_output = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        width = self.to_output.in_features
        if x_BTD.ndim != 3 or x_BTD.shape[2] != width:
            raise ShapeError(f"expected (batch, tokens, {width}), got {tuple(x_BTD.shape)}")
        qkv_BTHK = self.to_query_key_value(x_BTD).unflatten(2, (3 * self.heads, -1))
        query, key, value = qkv_BTHK.transpose(1, 2).chunk(3, dim=1)
        # Called by its full name, at call time: whoever watches attention from outside may wrap the function.
        mixed_BHTK = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        y_BTD: Tensor = self.to_output(mixed_BHTK.transpose(1, 2).flatten(2))
        return y_BTD


class FeedForward(nn.Module):
    """phi(X W1) W2 of Algorithm 1, with biases and phi = GELU. Takes and returns (B, T, D)."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        if ffn < 1:
            raise InvalidArgument(f"the feed-forward network needs a hidden width of at least 1, got {ffn}")
        self.expand = nn.Linear(width, ffn)
        self.contract = nn.Linear(ffn, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.contract(torch.nn.functional.gelu(self.expand(x_BTD)))
        return y_BTD


class DeEscalation(nn.Module):
    """Y = (I - tau P) X with P = 11'/T: takes a share `tau` of the mean token away from every token.

    Classic Transformers (arXiv 2312.06182), Eq. 21. tau = 0 changes nothing, tau = 1 removes all token similarity.
    The mean over a whole sequence tells early tokens about late ones. Where `causal`, token t gives up the mean of
    tokens 0 to t instead: P is lower triangular, its row t is 1/(t + 1), and tau = 1 turns token 0 into zeros.

    Takes and returns (B, T, D). Sequences are full: padding would count as tokens.
    Raises InvalidArgument unless tau is in [0, 1].
    """

    def __init__(self, tau: float, causal: bool = False) -> None:
        super().__init__()
        if not 0.0 <= tau <= 1.0:
            raise InvalidArgument(f"tau is the share of the mean token to remove, from 0 to 1, got {tau}")
        self.tau = tau
        self.causal = causal

    def forward(self, x_BTD: Tensor) -> Tensor:
        mean = prefix_mean(x_BTD) if self.causal else x_BTD.mean(dim=1, keepdim=True)
        return x_BTD - self.tau * mean  # (I - tau P) X, Eq. 21

    def extra_repr(self) -> str:
        return f"tau={self.tau}, causal={self.causal}"


def prefix_mean(x_BTD: Tensor) -> Tensor:
    """Mean of tokens 0 to t, for each t: (B, T, D). Sums run in float32 or wider."""
    sums_BTD = x_BTD.cumsum(dim=1, dtype=torch.promote_types(x_BTD.dtype, torch.float32))
    counts_T = torch.arange(1, x_BTD.shape[1] + 1, device=x_BTD.device)
    return (sums_BTD / counts_T[:, None]).to(x_BTD.dtype)


class PostNormBlock(nn.Module):
    """Algorithm 1 of Classic Transformers (arXiv 2312.06182): the block of the original Transformer.

    Takes and returns (B, T, D). `alpha` weighs attention against the residual.
    """

    def __init__(self, width: int, heads: int, ffn: int, alpha: float = 1.0, causal: bool = False) -> None:
        super().__init__()
        self.alpha = alpha
        self.attention = SelfAttention(width, heads, causal)
        self.norm1 = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, ffn)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.norm1(x_BTD + self.alpha * self.attention(x_BTD))  # steps 0 to 2
        z_BTD: Tensor = self.norm2(y_BTD + self.feed_forward(y_BTD))  # steps 3 and 4
        return z_BTD


class DeEscalatedBlock(PostNormBlock):
    """Post-norm block that gives up a share `tau` of its token mean at the end (Eq. 21 after Algorithm 1).

    Takes and returns (B, T, D). It has the parameters of a PostNormBlock: equal seeds give equal weights.
    To see how alike its tokens grow, look at the input of `deescalation`: at tau = 1 the output shows nothing.
    """

    def __init__(
        self, width: int, heads: int, ffn: int, tau: float = 1.0, alpha: float = 1.0, causal: bool = False
    ) -> None:
        super().__init__(width, heads, ffn, alpha, causal)
        self.deescalation = DeEscalation(tau, causal)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.deescalation(super().forward(x_BTD))
        return y_BTD


def stack_of_blocks(depth: int, width: int, heads: int, ffn: int, tau: float | None, causal: bool) -> nn.ModuleList:
    """`depth` post-norm blocks; with a `tau`, de-escalated ones."""
    if depth < 1:
        raise InvalidArgument(f"a model needs a depth of at least one block, got {depth}")
    if tau is None:
        return nn.ModuleList(PostNormBlock(width, heads, ffn, causal=causal) for _ in range(depth))
    return nn.ModuleList(DeEscalatedBlock(width, heads, ffn, tau, causal=causal) for _ in range(depth))
