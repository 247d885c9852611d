"""Which queries, keys and values attention uses: the rules of Value Residual Learning, as fields that can be combined.

Axes: `B` batch, `T` tokens, `S` tokens that are attended to, `D` width, `H` heads, `K` width of a head.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from tsemon.errors import InvalidArgument

Source = Literal["first", "previous", "all"]
Dense = Literal["blocks", "attention"]
Part = Literal["query", "key", "value"]
Weights = tuple[float, float]
PARTS: tuple[Part, ...] = ("query", "key", "value")


@dataclass(frozen=True, kw_only=True)
class ValueRule:
    """How layer n combines its values V_n with those of earlier layers. By default: A_n V_n.

    A_n is the layer's attention matrix, V_m the earlier value that `value_source` names, U_n what goes into the layer's
    output projection. Layer 1 has no earlier value and is the same under all rules. Queries Q_n and keys K_n, turned by
    their positions, can be shared and mixed in the same way.
    Equation numbers are those of Value Residual Learning. Raises InvalidArgument for what does not go together.
    """

    value_source: Source = "first"
    """V_m: the value of layer 1 (V_1), of the layer before (V_n-1), or the mean over all layers before (Eq. 6)."""
    value_weights: Weights | Literal["mean"] = (1.0, 0.0)
    """Weights of V_n and V_m in the value that A_n mixes: W_n. (1/2, 1/2) is ResFormer (Eq. 7), (1, lambda) its lambda
    variant. "mean" with `value_source="all"` is the mean of V_1 to V_n (Eq. 5)."""
    query_weights: Weights = (1.0, 0.0)
    """The same for Q_n and Q_m (Fig. 9)."""
    key_weights: Weights = (1.0, 0.0)
    """The same for K_n and K_m (Fig. 9)."""
    learn_value_weights: bool = False
    """Whether the two weights of values are parameters of each layer after the first, which start there."""
    value_every: int | None = 1
    """A layer projects a value of its own every so many layers, and those between take over the newest (the anchors of
    Fig. 17); None: layer 1 alone does (SVFormer, Eq. 10)."""
    query_every: int | None = 1
    """The same for queries (2 in Fig. 5, None in Fig. 16)."""
    key_every: int | None = 1
    """The same for keys. With `value_every`, 2 is the cross-layer attention (CLA) of arXiv 2405.12981."""
    neutreno: float = 0.0
    """lambda of NeuTRENO (Eq. 8): U_n = A_n W_n + lambda (V_m - W_n). Together with ResFormer the authors' code, too, takes
    away the W_n that attention mixed, and not V_n."""
    identity: bool = False
    """The identity mapping (Eq. 6): U_n = A_n W_n + V_m."""
    cross_layer: bool = False
    """Cross-layer attention (Eq. 2): one softmax over the keys of layers n and m, each up to the query's token."""
    dense: Dense | None = None
    """Weighted sums over depth, whose weights start with 1 for the newest and 0 for all before.
    "blocks": after each block, over the embeddings and the outputs of all blocks so far (the DenseFormer paper).
    "attention": U_n = sum over i <= n of alpha_i A_i W_i (Eq. 9)."""

    def __post_init__(self) -> None:
        if self.value_source not in ("first", "previous", "all"):
            raise InvalidArgument(f"value_source must be 'first', 'previous' or 'all', got {self.value_source!r}")
        for name in PARTS:
            weights, every = getattr(self, f"{name}_weights"), getattr(self, f"{name}_every")
            if weights == "mean":
                if name != "value" or self.learn_value_weights or self.value_source != "all":
                    raise InvalidArgument(
                        "only value_weights may be 'mean', with value_source='all' and without learn_value_weights; "
                        f"got {name}_weights='mean', value_source={self.value_source!r}, "
                        f"learn_value_weights={self.learn_value_weights}"
                    )
            elif not (isinstance(weights, tuple | list) and len(weights) == 2 and all(map(_is_number, weights))):
                letter = name[0].upper()
                raise InvalidArgument(
                    f"{name}_weights are two numbers, of {letter}_n and of {letter}_m, got {weights!r}"
                )
            if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
                raise InvalidArgument(
                    f"{name}_every counts layers, 1 or more, or is None if only the first has a {name}, got {every!r}"
                )
        if 1 not in (self.query_every, self.key_every, self.value_every):
            raise InvalidArgument(
                "one of query_every, key_every and value_every must be 1: a layer that projects no query, key or value does "
                f"not see its input; got {self.query_every}, {self.key_every} and {self.value_every}"
            )
        if self.dense not in (None, "blocks", "attention"):
            raise InvalidArgument(f"dense must be None, 'blocks' or 'attention', got {self.dense!r}")
        if self.cross_layer and self.value_source == "all":
            raise InvalidArgument("cross_layer attends to one layer's keys; value_source must be 'first' or 'previous'")

    def has_own(self, part: Part, layer: int) -> bool:
        """Whether the layer, counted from 0, projects a query, key or value of its own."""
        every: int | None = getattr(self, f"{part}_every")
        return layer == 0 or (every is not None and layer % every == 0)

    def weights_of_values(self, layer: int) -> Weights:
        """`value_weights` in the layer, counted from 0."""
        return (1 / (layer + 1), layer / (layer + 1)) if self.value_weights == "mean" else self.value_weights

    def mixed(self, weights: Weights | Tensor, newest: Tensor, earlier: tuple[Tensor, ...]) -> Tensor:
        """The sum of the newest query, key or value and the earlier one, with these weights."""
        if not earlier or (not isinstance(weights, Tensor) and weights == (1.0, 0.0)):
            return newest
        own, other = weights
        return own * newest + other * self.source(earlier)

    def keep(self, earlier: tuple[Tensor, ...], newest: Tensor) -> tuple[Tensor, ...]:
        """Of all layers' keys or values, those that a later layer may ask for."""
        return (*earlier, newest) if self.value_source == "all" else (*earlier[:1], newest)

    def source(self, earlier: tuple[Tensor, ...]) -> Tensor:
        match self.value_source:
            case "first":
                return earlier[0]
            case "previous":
                return earlier[-1]
            case "all":
                return torch.stack(earlier).mean(dim=0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Earlier(NamedTuple):
    """What the layers before leave to the next, as far as the rule asks for it; oldest first."""

    queries: tuple[Tensor, ...] = ()
    """Q_n, (B, H, T, K) each, turned by their positions and not mixed."""
    keys: tuple[Tensor, ...] = ()
    """(B, H, S, K) each, turned by their positions; those of tokens in the cache among them, as in `values`."""
    values: tuple[Tensor, ...] = ()
    """V_n, (B, H, S, K) each, as projected."""
    attended: tuple[Tensor, ...] = ()
    """What attention gave, (B, H, T, K) each."""
    states: tuple[Tensor, ...] = ()
    """The embeddings, then the outputs of the blocks before they were averaged, (B, T, D) each."""


class DepthWeighted(nn.Module):
    """sum_i alpha_i X_i over tensors from the oldest to the newest; starts as the newest alone."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(num).index_fill(0, torch.tensor(num - 1), 1.0))

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return functools.reduce(torch.add, map(torch.mul, self.alpha.unbind(), tensors))
