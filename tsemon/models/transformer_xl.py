"""Transformer-XL (arXiv 1901.02860): a language model that remembers the segment before, and knows distances only.

Axes: `B` batch, `T` tokens of the segment, `M` remembered tokens, `S` = M + T, `D` width, `H` heads, `K` width of a head,
`V` vocabulary, `N` tokens of all sequences together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tsemon.errors import InvalidArgument, ShapeError
from tsemon.models import presets
from tsemon.models.attention import AttentionPath, attend, check_heads, visible
from tsemon.models.blocks import BlockConfig, last_norm, stack
from tsemon.models.cache import Cache
from tsemon.models.presets import OfPreset, Presets, Sizes


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(BlockConfig, Presets):
    PRESETS: ClassVar[Mapping[str, Sizes]] = presets.TRANSFORMER_XL
    vocab: int
    context: int
    """Tokens of a segment, for who trains it. The model reads segments of any length."""
    memory: int
    """M: how many tokens before the segment are remembered; 0 for none."""
    depth: int
    cutoffs: tuple[int, ...] = ()
    """Where rarer words begin, in a vocabulary sorted by frequency: bounds of an adaptive softmax. (): a plain softmax."""
    init_std: float = 0.02
    causal: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab < 1 or self.context < 1 or self.memory < 0:
            raise InvalidArgument(
                "vocab and context must be at least 1 and memory at least 0, "
                f"got vocab {self.vocab}, context {self.context} and memory {self.memory}"
            )
        bounds = (0, *self.cutoffs, self.vocab)
        if any(low >= high for low, high in itertools.pairwise(bounds)):
            raise InvalidArgument(f"cutoffs must rise between 0 and the vocabulary of {self.vocab}, got {self.cutoffs}")
        if not self.causal or self.reparameterisation is not None or self.masking != "exclude":
            raise InvalidArgument(
                "a TransformerXL is causal and has attention of its own kind, "
                f"got causal={self.causal}, reparameterisation={self.reparameterisation!r} and masking={self.masking!r}"
            )

    def self_attention(self) -> nn.Module:
        return RelativeAttention(self.width, self.heads, self.memory, scale=self.score_scale, path=self.attention)


class RelativeAttention(nn.Module):
    """Attention to the segment and the memory before it, by content and by distance. (B, T, D) to the same.

    Query i scores key j, each in its head, with the four terms of Section 3.3 (W_q x_i = q_i, W_k x_j = k_j):

        q_i' k_j  +  q_i' W_R R(i-j)  +  u' k_j  +  v' W_R R(i-j)        times `scale`, by default 1 / sqrt(D / H)

    R(distance) are sinusoids. u and v say which content and which distance matter whatever the query is.
    What the module has read stays in the cache, without gradient: the last `memory` tokens, which the next segment sees.
    Raises InvalidArgument unless `heads` divides `width` and width is even, ShapeError when the input has another width.
    """

    def __init__(
        self, width: int, heads: int, memory: int, *, scale: float | None = None, path: AttentionPath = "sdpa"
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        if width % 2:
            raise InvalidArgument(f"width must be even, half for sines and half for cosines, got {width}")
        self.heads = heads
        self.memory = memory
        self.scale = math.sqrt(heads / width) if scale is None else scale
        self.path = path
        self.to_query = nn.Linear(width, width, bias=False)
        self.to_key = nn.Linear(width, width, bias=False)
        self.to_value = nn.Linear(width, width, bias=False)
        self.to_position = nn.Linear(width, width, bias=False)  # W_R
        self.u_HK = nn.Parameter(torch.zeros(heads, width // heads))
        self.v_HK = nn.Parameter(torch.zeros(heads, width // heads))
        self.to_output = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        width = self.to_output.in_features
        if x_BTD.ndim != 3 or x_BTD.shape[2] != width:
            raise ShapeError(f"expected (batch, tokens, {width}), got {tuple(x_BTD.shape)}")
        seen_BSD = x_BTD if cache is None else self._recall(x_BTD, cache)
        query, key, value = self._heads(self.to_query(x_BTD), self.to_key(seen_BSD), self.to_value(seen_BSD))
        bias_BHTS = self._position_scores(query, seen_BSD.shape[1])  # terms 2 and 4
        content_BHTK = query + self.u_HK[:, None]  # makes terms 1 and 3
        mixed_BHTK = attend(
            content_BHTK, key, value, causal=False, path=self.path, scale=self.scale, bias_BHTS=bias_BHTS
        )
        y_BTD: Tensor = self.to_output(mixed_BHTK.transpose(1, 2).flatten(2))
        return y_BTD

    def _recall(self, x_BTD: Tensor, cache: Cache) -> Tensor:
        (seen_BSD,) = cache.append(self, seen=x_BTD)
        first_kept = max(seen_BSD.shape[1] - self.memory, 0)
        cache.keep(self, "seen", seen_BSD[:, first_kept:].detach())
        return seen_BSD

    def _position_scores(self, query_BHTK: Tensor, num_seen: int) -> Tensor:
        """What is added to the scores of content; -inf where a key lies after its query."""
        sinusoids_1SD = falling_distances(num_seen, self.to_position.in_features, query_BHTK)[None]
        (position_1HSK,) = self._heads(self.to_position(sinusoids_1SD))
        by_distance_BHTS = (query_BHTK + self.v_HK[:, None]) @ position_1HSK.transpose(2, 3)
        scores_BHTS = self.scale * relative_shift(by_distance_BHTS)
        return scores_BHTS.masked_fill(~visible(query_BHTK.shape[2], num_seen, query_BHTK.device), -math.inf)

    def _heads(self, *states_BTD: Tensor) -> tuple[Tensor, ...]:
        size = self.to_output.in_features // self.heads
        return tuple(x_BTD.view(*x_BTD.shape[:2], self.heads, size).transpose(1, 2) for x_BTD in states_BTD)


def falling_distances(num_tokens: int, width: int, like: Tensor) -> Tensor:
    """R of the distances S - 1, ..., 1, 0: (S, D), sines and then cosines of distance / 10000^(2k / D)."""
    wide = torch.promote_types(like.dtype, torch.float32)
    distances_S = torch.arange(num_tokens - 1, -1, -1, device=like.device, dtype=wide)
    frequencies = 10000 ** (-torch.arange(0, width, 2, device=like.device, dtype=wide) / width)
    angles = distances_S[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


def relative_shift(by_distance_BHTS: Tensor) -> Tensor:
    """From columns that are distances S - 1 to 0 to columns that are the keys 0 to S - 1 (Appendix B).

    The queries are the last T of S tokens. Row i moves T - 1 - i places to the left. With one column put before, the rows
    laid end to end are that shifted picture, T places late. What ends up right of a query's own token has no meaning.
    """
    padded = functional.pad(by_distance_BHTS, (1, 0)).flatten(2)
    return padded[:, :, by_distance_BHTS.shape[2] :].view_as(by_distance_BHTS)


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of words, the rare ones in clusters (Grave et al. 2017, arXiv 1609.04309), all of one width.

    log p(word) = log p(cluster) + log p(word | cluster); the frequent words stand beside the clusters as they are. A loss
    needs only the clusters in which its targets lie. Without cutoffs it is the plain softmax. Sums are in float32 or wider.
    Its weight is the embedding's.
    """

    def __init__(self, embedding: nn.Embedding, cutoffs: Sequence[int]) -> None:
        super().__init__()
        vocab, width = embedding.num_embeddings, embedding.embedding_dim
        self.bounds = list(itertools.pairwise((0, *cutoffs, vocab)))
        self.weight = embedding.weight
        self.bias = nn.Parameter(torch.zeros(vocab))
        self.to_clusters = nn.Linear(width, len(cutoffs)) if cutoffs else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Of every word: (B, T, V)."""
        head = self._head(x_BTD)
        num_frequent = self.bounds[0][1]
        rare = [
            head[..., num_frequent + number, None] + self._within(x_BTD, bound)
            for number, bound in enumerate(self.bounds[1:])
        ]
        return torch.cat([head[..., :num_frequent], *rare], dim=-1)

    def loss(self, x_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Mean negative log-probability of the targets, in nats."""
        num_frequent = self.bounds[0][1]
        cluster_N = sum(((targets_N >= low).long() for low, _ in self.bounds[1:]), torch.zeros_like(targets_N))
        column_N = torch.where(cluster_N == 0, targets_N, num_frequent - 1 + cluster_N)
        total = _chosen(self._head(x_ND), column_N)
        for number, (low, high) in enumerate(self.bounds[1:], start=1):
            rows = (cluster_N == number).nonzero().squeeze(1)
            total = total + _chosen(self._within(x_ND[rows], (low, high)), targets_N[rows] - low)
        return -total / len(targets_N)

    def _head(self, x_BTD: Tensor) -> Tensor:
        """Log-probabilities of the frequent words, then of the clusters."""
        logits = self._logits(x_BTD, self.bounds[0])
        if self.to_clusters is not None:
            logits = torch.cat([logits, self.to_clusters(x_BTD)], dim=-1)
        return _log_softmax(logits)

    def _within(self, x_BTD: Tensor, bound: tuple[int, int]) -> Tensor:
        return _log_softmax(self._logits(x_BTD, bound))

    def _logits(self, x_BTD: Tensor, bound: tuple[int, int]) -> Tensor:
        words = slice(*bound)
        return functional.linear(x_BTD, self.weight[words], self.bias[words])


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _chosen(log_probabilities: Tensor, column_N: Tensor) -> Tensor:
    return log_probabilities.gather(1, column_N[:, None]).sum()


class TransformerXL(OfPreset, nn.Module):
    """Blocks of relative attention over a segment and the memory of those before; the embedding is the output's weight.

    The memory is one tensor (B, up to M, D) for each block: what its attention read last, which is the block's input (of a
    pre-norm block, after its norm), without gradient. Hand it in with the segment that follows.

    With a `tau` the model is de-escalated by prefix means over the tokens of the current segment, not the memory's: the
    mean begins anew with each segment, and at tau = 1 its first token gives up all it is. `full_mean` takes the mean of
    the whole segment, as the operator is printed (Eq. 21 of arXiv 2312.06182): it tells early tokens about late ones.

    As its authors' code does, embeddings are scaled by sqrt(D), all blocks share u and v, and weights start normal with
    `init_std`. Theirs has dropout, and no norm after the last pre-norm block.
    Raises InvalidArgument for sizes that do not fit together, ShapeError for a memory of another batch or model.
    """

    CONFIG = TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = stack(config, config.depth)
        self.norm = last_norm(config)
        self.softmax = AdaptiveSoftmax(self.embed, config.cutoffs)
        first, *others = self._attentions()
        for attention in others:
            attention.u_HK, attention.v_HK = first.u_HK, first.v_HK
        self.apply(self._start)

    def forward(
        self, tokens_BT: Tensor, memory: Sequence[Tensor] | None = None, targets_BT: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Log-probabilities (B, T, V) of the token that follows each, or with targets their mean loss; and the memory.

        Raises InvalidArgument for the log-probabilities of a model with cutoffs: its vocabulary is too large for them.
        """
        if targets_BT is None and self.config.cutoffs:
            raise InvalidArgument(
                f"(batch, tokens, {self.config.vocab}) log-probabilities are what the adaptive softmax is there to avoid; "
                "ask for loss(tokens, targets, memory), or for read(tokens) about the next token"
            )
        cache = self._with_memory(tokens_BT, memory)
        x_BTD = self._hidden(tokens_BT, cache)
        newest = [cast(Tensor, cache.recall(attention, "seen")) for attention in self._attentions()]
        if targets_BT is None:
            return self.softmax(x_BTD), newest
        return self.softmax.loss(x_BTD.flatten(0, 1), targets_BT.flatten()), newest

    def loss(
        self, tokens_BT: Tensor, targets_BT: Tensor, memory: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Mean loss in nats of the targets, each the token after its own, and the memory. Works with any cutoffs."""
        loss, newest = self(tokens_BT, memory, targets_BT)
        return loss, newest

    def read(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Log-probabilities (B, 1, V) of the token that follows the last one. `generate(model.read, ...)` writes with it.

        All that is read with one cache is one segment: token by token gives what reading at once gives, as long as it all
        fits in the memory. Of what is older the cache keeps nothing but the sums of the prefix means.
        """
        x_BTD = self._hidden(tokens_BT, Cache() if cache is None else cache)
        log_probabilities_B1V: Tensor = self.softmax(x_BTD[:, -1:])
        return log_probabilities_B1V

    def _hidden(self, tokens_BT: Tensor, cache: Cache) -> Tensor:
        if tokens_BT.ndim != 2 or tokens_BT.shape[1] < 1:
            raise ShapeError(f"expected (batch, tokens) with at least one token, got {tuple(tokens_BT.shape)}")
        x_BTD = math.sqrt(self.config.width) * self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cache)
        cache.num_tokens += tokens_BT.shape[1]
        y_BTD: Tensor = self.norm(x_BTD)
        return y_BTD

    def _with_memory(self, tokens_BT: Tensor, memory: Sequence[Tensor] | None) -> Cache:
        cache = Cache()
        if memory is None:
            return cache
        batch, width, depth = len(tokens_BT), self.config.width, self.config.depth
        if len(memory) != depth or any(m.ndim != 3 or m[:, 0:0].shape != (batch, 0, width) for m in memory):
            shapes = sorted({tuple(m.shape) for m in memory})
            raise ShapeError(
                f"expected a memory of {depth} tensors ({batch}, remembered, {width}), got {len(memory)} of {shapes}"
            )
        for attention, m_BMD in zip(self._attentions(), memory, strict=True):
            cache.keep(attention, "seen", m_BMD.detach())
        return cache

    def _attentions(self) -> list[RelativeAttention]:
        return [cast(RelativeAttention, block.attention) for block in self.blocks]

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.init_std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, RelativeAttention):
            nn.init.normal_(module.u_HK, std=self.config.init_std)
            nn.init.normal_(module.v_HK, std=self.config.init_std)
