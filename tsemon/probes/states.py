"""Hidden states as they pass by: found among arguments and outputs, turned to (batch, tokens, width), read once.

Axes: B samples, T tokens, D width.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tsemon.measures import TokenStatistics
from tsemon.measures.sequences import Sequences
from tsemon.measures.states import Batch
from tsemon.probes.discovery import Block
from tsemon.probes.layout import Layouts
from tsemon.probes.packing import Packing

NO_STATE = (
    "the block got or returned no floating-point tensor with two to four axes and at least one token, which would be its "
    "hidden state"
)


class HiddenStates:
    """Shared by the probes of hidden states, so that a state that several of them look at is read once."""

    def __init__(self, packing: Packing, layouts: Layouts) -> None:
        self._packing = packing
        self.layouts = layouts
        self.forget()

    def forget(self) -> None:
        self._newest: tuple[Seen, int, TokenStatistics] | None = None
        self._newest_gram: tuple[TokenStatistics, Tensor] | None = None
        self._copied: tuple[Seen, Tensor] | None = None

    def oriented(self, block: Block, x: Tensor) -> Tensor | None:
        """The state as (B, T, D), detached; None while it is not decided where its tokens are."""
        return self.layouts.oriented(block, x)

    def sequences(self, block: Block, x_BTD: Tensor) -> Sequences | None:
        """None if it is not known which tokens form one."""
        return self._packing.of(block.stack, *x_BTD.shape[:2])

    def settle(self, block: Block) -> None:
        """The block's attention has run: decide the rest without it."""
        self.layouts.settle(block)
        self._packing.settle(block)
        self._copied = None

    def why_undecided(self, block: Block) -> str:
        """Why states of this block's stack are not measured; empty if they are."""
        return self.layouts.why_not(block) or self._packing.why_not(block.stack)

    def kept(self, block: Block, x: Tensor) -> Tensor | None:
        """A copy of the block's input if only its attention can tell how to read it: the block may write into it."""
        if not (self.layouts.is_open(block) or self._packing.waits_for_attention(block)):
            return None
        if self._copied is None or not self._copied[0].is_still(x):
            self._copied = Seen(x), x.detach().clone()
        return self._copied[1]

    def statistics(self, block: Block, x: Tensor) -> TokenStatistics | None:
        """Statistics of the sequences of a state as it passed by. One block's output is the next one's input."""
        if self._newest is not None and self._newest[0].is_still(x) and self._newest[1] == block.stack:
            return self._newest[2]
        if (x_BTD := self.oriented(block, x)) is None or (sequences := self.sequences(block, x_BTD)) is None:
            return None
        statistics = sequences.statistics(x_BTD)
        self._newest = Seen(x), block.stack, statistics
        return statistics

    def gram(self, block: Block, x: Tensor, statistics: TokenStatistics) -> Tensor | None:
        """Gram matrix of tokens of the first sequence; None if it is not known how to read the state."""
        if self._newest_gram is not None and self._newest_gram[0] is statistics:
            return self._newest_gram[1]
        if (x_BTD := self.oriented(block, x)) is None or (sequences := self.sequences(block, x_BTD)) is None:
            return None
        gram_KK = sequences.gram(x_BTD, statistics.unit, Batch.of(statistics).counts_B)
        self._newest_gram = statistics, gram_KK
        return gram_KK


class Seen:
    """Recognizes a tensor without keeping it alive, until something writes into it."""

    def __init__(self, x: Tensor) -> None:
        self._x = weakref.ref(x)
        self._version = version_of(x)

    def is_still(self, x: Tensor) -> bool:
        return self._x() is x and version_of(x) == self._version


def version_of(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def hidden_state(value: Any, width: int | None, like: torch.Size | None = None) -> Tensor | None:
    """The hidden state in a block's arguments or output, however they are nested: the first tensor with three axes.

    If none has, the first with two or four: tokens without a batch axis, or a grid of them. Tensors as wide as the block
    come first, because positions and biases may have three axes, too; before them those with the shape `like`, because
    blocks of two streams may return them in another order than they got them.
    """
    tensors = [x for x in _tensors(value) if x.is_floating_point() and 2 <= x.ndim <= 4 and x.numel()]
    as_wide = [x for x in tensors if width == x.shape[-1] or (x.ndim == 4 and width == x.shape[1])]
    tensors = [x for x in as_wide if x.shape == like] or as_wide or tensors
    return next((x for x in tensors if x.ndim == 3), tensors[0] if tensors else None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        # A tensor that is spread over processes is not read: its similarity is not that of the part that is here.
        if not hasattr(value, "to_local"):
            yield value
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
