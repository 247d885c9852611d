"""Which values attention mixes: the rules of Value Residual Learning, as fields that go together in any way.

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


@dataclass(frozen=True, kw_only=True)
class ValueRule:
    """What layer n makes of its values V_n and those of layers before it. As it stands: A_n V_n, nothing more.

    A_n is the layer's attention matrix, V_m the earlier value that `value_source` names, U_n what goes into the layer's
    output projection. Layer 1 has no earlier value and is the same under all rules.
    Equation numbers are those of Value Residual Learning. Raises InvalidArgument for what does not go together.
    """

    value_source: Source = "first"
    """V_m: the value of layer 1 (V_1), of the layer before (V_n-1), or the mean over all layers before (Eq. 6)."""
    value_weights: tuple[float, float] = (1.0, 0.0)
    """Of V_n and V_m in the value that A_n mixes: W_n. (1/2, 1/2) is ResFormer (Eq. 7), (1, lambda) its lambda variant."""
    learn_value_weights: bool = False
    """Whether these two are parameters of each layer after the first, which start there."""
    value_every: int | None = 1
    """A layer projects a value of its own every so many layers, and those between take over the newest (the anchors of
    Fig. 17); None: layer 1 alone does (SVFormer, Eq. 10)."""
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
        if len(self.value_weights) != 2:
            raise InvalidArgument(f"value_weights are two, of V_n and of V_m, got {self.value_weights}")
        if self.value_every is not None and self.value_every < 1:
            raise InvalidArgument(
                f"value_every counts layers, 1 or more, or is None where only the first has a value, got {self.value_every}"
            )
        if self.dense not in (None, "blocks", "attention"):
            raise InvalidArgument(f"dense must be None, 'blocks' or 'attention', got {self.dense!r}")
        if self.cross_layer and self.value_source == "all":
            raise InvalidArgument("cross_layer attends to one layer's keys; value_source must be 'first' or 'previous'")

    def has_value(self, layer: int) -> bool:
        """Whether the layer, counted from 0, projects a value of its own."""
        return layer == 0 or (self.value_every is not None and layer % self.value_every == 0)

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


class Earlier(NamedTuple):
    """What the layers before leave to the next, as far as the rule asks for it; oldest first."""

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
