"""Llama-like language models with the value rules of Value Residual Learning.

Axes: `B` batch, `T` tokens, `S` tokens that are attended to, `D` width, `H` heads, `K` width of a head, `F` hidden width of
the feed-forward network, `V` vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument
from tsemon.models import presets
from tsemon.models.attention import AttentionPath, attend, visible
from tsemon.models.cache import Cache, positions
from tsemon.models.presets import OfPreset, Presets, Sizes
from tsemon.models.values import PARTS, DepthWeighted, Earlier, ValueRule, Weights


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ValueRule, Presets):
    """Sizes and value rule of a model. Presets are a rule and a size: "vanilla-82m", "resformer-82m", ...

    The default vocabulary is that of RedPajama-INCITE-7B-Base's tokenizer, as Table 4 has it. With it the sizes have
    1.62, 81.9, 179.9, 322.9 and 467.9 million parameters: the 2M, 82M, 180M, 320M and 468M of the paper.
    Raises InvalidArgument for sizes that do not fit together.
    """

    PRESETS: ClassVar[Mapping[str, Sizes]] = {
        f"{rule}-{size}": {**sizes, **fields}
        for (rule, fields), (size, sizes) in itertools.product(presets.VALUE_RULES.items(), presets.LLAMA_SIZES.items())
    }
    vocab: int = 50_277
    context: int = 2048
    depth: int
    width: int
    heads: int
    key_value_heads: int | None = None
    """Fewer than `heads` for grouped queries (GQA); None for as many."""
    ffn: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    attention: AttentionPath = "sdpa"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocab", "context", "depth", "width", "heads", "ffn"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise InvalidArgument(
                f"rotary positions need heads of even width, got width {self.width} and {self.heads} heads; "
                "choose a width that twice the number of heads divides"
            )
        if self.num_key_value_heads < 1 or self.heads % self.num_key_value_heads:
            raise InvalidArgument(
                f"key_value_heads must divide heads, got {self.key_value_heads} and {self.heads} heads"
            )
        for name in PARTS:
            every = getattr(self, f"{name}_every")
            if every is not None and every > self.depth:
                raise InvalidArgument(
                    f"{name}_every counts layers, at most as many as the depth, got {every} and depth {self.depth}; "
                    f"{name}_every=None shares the first layer's {name} with all others"
                )
        if self.attention not in ("sdpa", "materialised"):
            raise InvalidArgument(f"attention must be 'sdpa' or 'materialised', got {self.attention!r}")

    @property
    def num_key_value_heads(self) -> int:
        return self.heads if self.key_value_heads is None else self.key_value_heads


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Without biases; weights start as N(0, 0.02^2)."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


def rotary_tables(start: int, end: int, like: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, (T, K / 2) each, of the angles p theta^(-2i / K) at positions p from `start` up to `end`.

    They are made anew for every pass, with angles in float64: a table kept in the model would be rounded with its weights.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=like.device) / size
    positions = torch.arange(start, end, dtype=torch.float64, device=like.device)
    angles = positions[:, None] / theta**exponents
    wide = torch.promote_types(like.dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x_BHTK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (x_i, x_(i + K/2)) by their token's angles. The first and second half pair up, as in Llama's code."""
    cosine, sine = tables
    left, right = x_BHTK.chunk(2, dim=-1)
    turned = torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=-1)
    return turned.to(x_BHTK.dtype)


class LlamaAttention(nn.Module):
    """Causal self-attention of layer `layer` (from 0) under a value rule.

    Takes (B, T, D) and what the layers before leave; gives (B, T, D) and what is left to the next.
    The value that attention's weights meet, and whoever watches from outside measures, is W_n: V_n mixed with V_m.
    In SVFormer it is the same V_1 in all layers. In cross-layer attention it is W_n and then V_m, one behind the other:
    twice as many keys as there are tokens, of which the first is layer n's own first token, where sinks are looked for.
    V_n alone is what `to_value` gives. In layers that share a projection, it is None.
    """

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        key_width = config.width // config.heads * config.num_key_value_heads
        # All three are drawn in any case, so that equal seeds give all rules equal weights.
        projections = (
            linear(config.width, config.width),
            linear(config.width, key_width),
            linear(config.width, key_width),
        )
        self.to_query, self.to_key, self.to_value = (
            projection if config.has_own(part, layer) else None
            for part, projection in zip(PARTS, projections, strict=True)
        )
        self.value_weights: Tensor | Weights = config.weights_of_values(layer)
        if config.learn_value_weights and layer > 0:
            self.value_weights = nn.Parameter(torch.tensor(self.value_weights))
        self.over_depth = DepthWeighted(layer + 1) if config.dense == "attention" else None
        self.to_output = linear(config.width, config.width)

    def forward(
        self, x_BTD: Tensor, tables: tuple[Tensor, Tensor], earlier: Earlier, cache: Cache | None = None
    ) -> tuple[Tensor, Earlier]:
        keep = self.config.keep
        query_BHTK, key_BHSK, value_BHSK = self._queries_keys_and_values(x_BTD, tables, earlier, cache)
        attended_BHTK = self._attended(query_BHTK, key_BHSK, value_BHSK, earlier)
        earlier = earlier._replace(
            queries=keep(earlier.queries, query_BHTK),
            keys=keep(earlier.keys, key_BHSK),
            values=keep(earlier.values, value_BHSK),
        )
        if self.over_depth is not None:
            earlier = earlier._replace(attended=(*earlier.attended, attended_BHTK))
            attended_BHTK = self.over_depth(earlier.attended)  # Eq. 9
        return self.to_output(attended_BHTK.transpose(1, 2).flatten(2)), earlier

    def _queries_keys_and_values(
        self, x_BTD: Tensor, tables: tuple[Tensor, Tensor], earlier: Earlier, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Q_n of these tokens, K_n and V_n of all tokens. A layer without its own takes the newest, and caches none."""
        query_BHTK = earlier.queries[-1] if self.to_query is None else rotate(self._heads(self.to_query(x_BTD)), tables)
        new = {}
        if self.to_key is not None:
            new["key"] = rotate(self._heads(self.to_key(x_BTD)), tables)
        if self.to_value is not None:
            new["value"] = self._heads(self.to_value(x_BTD))
        if cache is not None:
            new = dict(zip(new, cache.append(self, **new), strict=True))
        key_BHSK = new["key"] if "key" in new else earlier.keys[-1]
        return query_BHTK, key_BHSK, new["value"] if "value" in new else earlier.values[-1]

    def _attended(self, query_BHTK: Tensor, key_BHSK: Tensor, value_BHSK: Tensor, earlier: Earlier) -> Tensor:
        """U_n, before any sum over depth."""
        rule, tokens, path = self.config, query_BHTK.shape[2], self.config.attention
        if not earlier.values:
            return attend(query_BHTK, key_BHSK, value_BHSK, causal=True, path=path)
        source_BHSK = rule.source(earlier.values)
        query_BHTK = rule.mixed(rule.query_weights, query_BHTK, earlier.queries)
        key_BHSK = rule.mixed(rule.key_weights, key_BHSK, earlier.keys)
        value_BHSK = rule.mixed(self.value_weights, value_BHSK, earlier.values)  # Eq. 5 and 7 without A_n
        if rule.cross_layer:
            keys_BHSK = torch.cat([key_BHSK, rule.source(earlier.keys)], dim=2)
            values_BHSK = torch.cat([value_BHSK, source_BHSK], dim=2)
            visible_TS = visible(tokens, key_BHSK.shape[2], query_BHTK.device).repeat(1, 2)
            u_BHTK = attend(query_BHTK, keys_BHSK, values_BHSK, causal=False, visible_TS=visible_TS, path=path)  # Eq. 2
        else:
            u_BHTK = attend(query_BHTK, key_BHSK, value_BHSK, causal=True, path=path)
        if rule.neutreno:
            u_BHTK = u_BHTK + rule.neutreno * self._of_queries(source_BHSK - value_BHSK, tokens)  # Eq. 8
        if rule.identity:
            u_BHTK = u_BHTK + self._of_queries(source_BHSK, tokens)  # Eq. 6
        return u_BHTK

    def _of_queries(self, value_BHSK: Tensor, tokens: int) -> Tensor:
        """The values of the last tokens, once for each query head that shares them."""
        groups = self.config.heads // self.config.num_key_value_heads
        return value_BHSK[:, :, -tokens:].repeat_interleave(groups, dim=1)

    def _heads(self, x_BTD: Tensor) -> Tensor:
        size = self.config.width // self.config.heads
        return x_BTD.reshape(*x_BTD.shape[:2], x_BTD.shape[2] // size, size).transpose(1, 2)


class SwiGLU(nn.Module):
    """(silu(X G) * X W1) W2, without biases. Takes and returns (B, T, D)."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate = linear(width, ffn)
        self.expand = linear(width, ffn)
        self.contract = linear(ffn, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.contract(torch.nn.functional.silu(self.gate(x_BTD)) * self.expand(x_BTD))
        return y_BTD


class LlamaBlock(nn.Module):
    """Pre-norm block. Takes (B, T, D) and what the blocks before leave; gives the same for the next."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = LlamaAttention(config, layer)
        self.norm2 = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed_forward = SwiGLU(config.width, config.ffn)
        self.over_depth = DepthWeighted(layer + 2) if config.dense == "blocks" else None

    def forward(
        self, x_BTD: Tensor, tables: tuple[Tensor, Tensor], earlier: Earlier, cache: Cache | None = None
    ) -> tuple[Tensor, Earlier]:
        attended_BTD, left = self.attention(self.norm1(x_BTD), tables, earlier, cache)
        y_BTD = x_BTD + attended_BTD
        z_BTD = y_BTD + self.feed_forward(self.norm2(y_BTD))
        if self.over_depth is None:
            return z_BTD, left
        states = (*(left.states or (x_BTD,)), z_BTD)
        return self.over_depth(states), left._replace(states=states)


class Llama(OfPreset, nn.Module):
    """Decoder with RMS norms before each branch, SwiGLU, rotary positions, no biases, and an output layer of its own.

    Takes token numbers (B, T), returns logits (B, T, V) for the token that follows each. With a cache, T counts the tokens
    that it has read too; all in all they are up to `context`. Weights start as N(0, 0.02^2): equal seeds give equal
    weights whatever the value rule, which adds or leaves out only its own.
    Raises ShapeError for a sequence longer than the context.
    """

    CONFIG = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(LlamaBlock(config, layer) for layer in range(config.depth))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = linear(config.width, config.vocab)

    def forward(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        start, end = positions(tokens_BT, cache, self.config.context)
        x_BTD, earlier = self.embed(tokens_BT), Earlier()
        tables = rotary_tables(start, end, x_BTD, self.config.width // self.config.heads, self.config.rope_theta)
        for block in self.blocks:
            x_BTD, earlier = block(x_BTD, tables, earlier, cache)
        if cache is not None:
            cache.num_tokens = end
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV
