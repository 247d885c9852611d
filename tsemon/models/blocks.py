"""Transformer blocks: classic post-norm, pre-norm, the norm on the branch, and the one that holds token similarity down.

Axes: `B` batch, `T` tokens, `D` width, `H` heads, `F` hidden width of the feed-forward network.
Weights start as PyTorch's layers start them. Xavier's larger weights make a deep de-escalated model's gradient explode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument
from tsemon.models.attention import AttentionPath, Masking, SelfAttention
from tsemon.models.cache import Cache
from tsemon.models.reparameterised import ReparameterisationConfig, ReparameterisedAttention

Activation = Literal["gelu", "relu"]
Norm = Literal["post", "pre", "branch"]
Place = Literal["output", "feed_forward", "attention"]
CHOICES = {
    "norm": get_args(Norm),
    "activation": get_args(Activation),
    "tau_at": get_args(Place),
    "attention": get_args(AttentionPath),
    "masking": get_args(Masking),
}


@dataclass(frozen=True, kw_only=True)
class BlockConfig(ReparameterisationConfig):
    """Sizes and rules of one block. Raises InvalidArgument for rules that contradict each other."""

    width: int
    """D"""
    heads: int
    ffn: int
    """F"""
    norm: Norm = "post"
    """Where the norms stand: after the sum (the original Transformer), before each branch, or at each branch's end."""
    alpha: float = 1.0
    """Weighs attention against the residual (Algorithm 1 of Classic Transformers)."""
    activation: Activation = "gelu"
    causal: bool = False
    tau: float | None = None
    """Share of the mean token that a de-escalated block gives up (Eq. 21), from 0 to 1; None for none at all."""
    tau_at: Place = "output"
    """Where it is given up: after the last norm, at the feed-forward network's input, or after attention."""
    learn_tau: bool = False
    full_mean: bool = False
    """Take the mean of the whole sequence in a causal model too. It tells early tokens about late ones: for study only."""
    score_scale: float | None = None
    """Of the attention scores; None is 1 / sqrt(D / H)."""
    norm_affine: bool = True
    """Whether norms have weights and biases."""
    attention: AttentionPath = "sdpa"
    masking: Masking = "exclude"
    """`multiply` gives later tokens the score 0 instead of hiding them, as the code of Parameter Norm Growth's authors does:
    for study only."""

    def __post_init__(self) -> None:
        self.check_reparameterisation()
        for field, choices in CHOICES.items():
            if (value := getattr(self, field)) not in choices:
                raise InvalidArgument(f"{field} must be one of {choices}, got {value!r}")
        if self.tau is not None and self.norm != "post":
            raise InvalidArgument(f"de-escalation is for post-norm blocks, got tau={self.tau} with norm={self.norm!r}")
        if self.tau is None and (self.learn_tau or self.full_mean):
            raise InvalidArgument("learn_tau and full_mean say how tau works, but tau is None; give tau a number")
        if self.full_mean and not self.causal:
            raise InvalidArgument("full_mean is for causal models; others take the mean of the whole sequence anyway")
        if self.masking == "multiply" and (not self.causal or self.reparameterisation is not None):
            raise InvalidArgument(
                "masking='multiply' is for causal models with free weights, "
                f"got causal={self.causal} and reparameterisation={self.reparameterisation!r}"
            )

    def norms(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.width, elementwise_affine=self.norm_affine)

    def self_attention(self) -> nn.Module:
        width, heads, causal, scale, path = self.width, self.heads, self.causal, self.score_scale, self.attention
        if self.reparameterisation is None:
            return SelfAttention(width, heads, causal, scale=scale, path=path, masking=self.masking)
        return ReparameterisedAttention(width, heads, causal, scale=scale, path=path, config=self)


class FeedForward(nn.Module):
    """phi(X W1) W2 of Algorithm 1, with biases; phi is GELU or ReLU. Takes and returns (B, T, D)."""

    def __init__(self, width: int, ffn: int, activation: Activation = "gelu") -> None:
        super().__init__()
        if ffn < 1:
            raise InvalidArgument(f"the feed-forward network needs a hidden width of at least 1, got {ffn}")
        if activation not in ("gelu", "relu"):
            raise InvalidArgument(f"activation must be 'gelu' or 'relu', got {activation!r}")
        self.expand = nn.Linear(width, ffn)
        self.activation = activation
        self.contract = nn.Linear(ffn, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden_BTF = self.expand(x_BTD)
        phi = torch.nn.functional.gelu if self.activation == "gelu" else torch.nn.functional.relu
        y_BTD: Tensor = self.contract(phi(hidden_BTF))
        return y_BTD


class DeEscalation(nn.Module):
    """Y = (I - tau P) X with P = 11'/T: takes a share `tau` of the mean token away from every token.

    Classic Transformers (arXiv 2312.06182), Eq. 21. tau = 0 changes nothing, tau = 1 removes all token similarity.
    The mean over a whole sequence tells early tokens about late ones. Where `causal`, token t gives up the mean of
    tokens 0 to t instead: P is lower triangular, its row t is 1/(t + 1), and tau = 1 turns token 0 into zeros.
    Where `learn`, tau is a parameter that starts at the given value and is free to leave [0, 1].

    Takes and returns (B, T, D). Sequences are full: padding would count as tokens. Raises InvalidArgument unless tau is in
    [0, 1], and where the mean of the whole sequence is to go on from what a cache has read.
    """

    def __init__(self, tau: float, causal: bool = False, learn: bool = False) -> None:
        super().__init__()
        if not 0.0 <= tau <= 1.0:
            raise InvalidArgument(f"tau is the share of the mean token to remove, from 0 to 1, got {tau}")
        self.tau = nn.Parameter(torch.tensor(float(tau))) if learn else tau
        self.causal = causal

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is not None and cache.num_tokens and not self.causal:
            raise InvalidArgument("the mean of the whole sequence changes with every token: read without a cache")
        mean = self._prefix_mean(x_BTD, cache) if self.causal else x_BTD.mean(dim=1, keepdim=True)
        return x_BTD - self.tau * mean  # (I - tau P) X, Eq. 21

    def _prefix_mean(self, x_BTD: Tensor, cache: Cache | None) -> Tensor:
        """Mean of tokens 0 to t, for each t, those in the cache among them. Sums run in float32 or wider."""
        sums_BTD = x_BTD.cumsum(dim=1, dtype=torch.promote_types(x_BTD.dtype, torch.float32))
        counts_T = torch.arange(1, x_BTD.shape[1] + 1, device=x_BTD.device)
        if cache is not None:
            sums_BTD = sums_BTD + cache.total(self, sums_BTD[:, -1:])
            counts_T = counts_T + cache.num_tokens
        return (sums_BTD / counts_T[:, None]).to(x_BTD.dtype)

    def extra_repr(self) -> str:
        tau = "learned" if isinstance(self.tau, nn.Parameter) else f"{self.tau:g}"
        return f"tau={tau}, causal={self.causal}"


class PostNormBlock(nn.Module):
    """Algorithm 1 of Classic Transformers (arXiv 2312.06182): the block of the original Transformer. (B, T, D) to same."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.alpha = config.alpha
        self.attention = config.self_attention()
        self.norm1 = config.norms()
        self.feed_forward = FeedForward(config.width, config.ffn, config.activation)
        self.norm2 = config.norms()

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        y_BTD = self.norm1(x_BTD + self.alpha * self.attention(x_BTD, cache))  # steps 0 to 2
        z_BTD: Tensor = self.norm2(y_BTD + self.feed_forward(y_BTD))  # steps 3 and 4
        return z_BTD


class PreNormBlock(nn.Module):
    """Eq. 19 of Classic Transformers: the norms stand before each branch, and the residual stream is never normed.

    Takes and returns (B, T, D). A stack of these ends in a norm of its own (`last_norm`).
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.alpha = config.alpha
        self.norm1 = config.norms()
        self.attention = config.self_attention()
        self.norm2 = config.norms()
        self.feed_forward = FeedForward(config.width, config.ffn, config.activation)

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        y_BTD = x_BTD + self.alpha * self.attention(self.norm1(x_BTD), cache)
        z_BTD: Tensor = y_BTD + self.feed_forward(self.norm2(y_BTD))
        return z_BTD


class BranchNormBlock(PostNormBlock):
    """Definitions 5 and 6 of Parameter Norm Growth (arXiv 2010.09697): x + LN(f(x)), the block of its authors' models.

    Takes and returns (B, T, D). But for biases and attention's softmax the residual stream grows as its parameters do:
    twice the parameters give twice the output. Its parts are those of a PostNormBlock.
    """

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        y_BTD = x_BTD + self.alpha * self.norm1(self.attention(x_BTD, cache))
        z_BTD: Tensor = y_BTD + self.norm2(self.feed_forward(y_BTD))
        return z_BTD


class DeEscalatedBlock(nn.Module):
    """Post-norm block that gives up a share `tau` of its token mean (Eq. 21) at one place of Algorithm 1.

    Takes and returns (B, T, D). It has the parameters of a PostNormBlock: equal seeds give equal weights.
    To see how alike its tokens grow, look at the input of the de-escalation: at tau = 1 the output shows nothing.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.alpha = config.alpha
        self.attention = config.self_attention()
        self.after_attention = deescalation(config, "attention")
        self.norm1 = config.norms()
        self.before_feed_forward = deescalation(config, "feed_forward")
        self.feed_forward = FeedForward(config.width, config.ffn, config.activation)
        self.norm2 = config.norms()
        self.deescalation = deescalation(config, "output")

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        y_BTD = x_BTD + self.alpha * self.attention(x_BTD, cache)
        y_BTD = self.norm1(_apply(self.after_attention, y_BTD, cache))
        y_BTD = _apply(self.before_feed_forward, y_BTD, cache)
        z_BTD = self.norm2(y_BTD + self.feed_forward(y_BTD))
        return _apply(self.deescalation, z_BTD, cache)


def deescalation(config: BlockConfig, place: Place) -> DeEscalation | None:
    if config.tau is None or config.tau_at != place:
        return None
    return DeEscalation(config.tau, config.causal and not config.full_mean, config.learn_tau)


def _apply(step: DeEscalation | None, x_BTD: Tensor, cache: Cache | None) -> Tensor:
    if step is None:
        return x_BTD
    y_BTD: Tensor = step(x_BTD, cache)
    return y_BTD


Block = PostNormBlock | PreNormBlock | BranchNormBlock | DeEscalatedBlock


BLOCKS: Mapping[Norm, Callable[[BlockConfig], Block]] = {
    "post": PostNormBlock,
    "pre": PreNormBlock,
    "branch": BranchNormBlock,
}


def block(config: BlockConfig) -> Block:
    """The block that the config describes."""
    return BLOCKS[config.norm](config) if config.tau is None else DeEscalatedBlock(config)


def stack(config: BlockConfig, depth: int, num_weights: int | None = None) -> nn.ModuleList:
    """`depth` blocks, by default each with weights of its own; otherwise `num_weights` blocks take turns, each in a row."""
    if depth < 1:
        raise InvalidArgument(f"a model needs a depth of at least one block, got {depth}")
    num_weights = depth if num_weights is None else num_weights
    if num_weights < 1 or depth % num_weights:
        raise InvalidArgument(f"num_weights must divide the depth, got depth {depth} and num_weights {num_weights}")
    own = [block(config) for _ in range(num_weights)]
    return nn.ModuleList(own[layer * num_weights // depth] for layer in range(depth))


def last_norm(config: BlockConfig) -> nn.Module:
    """What a stack ends in: where blocks do not end in a norm, nothing has normed the residual stream yet."""
    return nn.Identity() if config.norm == "post" else config.norms()
