"""Hidden states as they pass by: found among arguments and outputs, turned to (batch, tokens, width), read once.

Axes: B samples, T tokens, D width.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tsemon.measures import TokenStatistics, token_statistics
from tsemon.probes.discovery import Block
from tsemon.probes.padding import Padding


class HiddenStates:
    """What the probes of hidden states share, so that a state that several of them look at is read once."""

    def __init__(self, blocks: Sequence[Block], padding: Padding) -> None:
        self._padding = padding
        self._tokens_first = {block.number for block in blocks if block.tokens_first}
        self._newest: tuple[Seen, int, TokenStatistics] | None = None

    def forget(self) -> None:
        self._newest = None

    def has_tokens_first(self, block: Block) -> bool:
        return block.number in self._tokens_first

    def turn_round(self) -> None:
        """It turned out that the blocks pass (batch, tokens, width) after all."""
        self._tokens_first.clear()
        self.forget()

    def oriented(self, block: Block, x: Tensor) -> Tensor:
        """The state as (B, T, D), detached."""
        return x.detach().transpose(0, 1) if self.has_tokens_first(block) else x.detach()

    def valid(self, block: Block, x_BTD: Tensor) -> Tensor | None:
        return self._padding.valid(block.stack, x_BTD.shape[0], x_BTD.shape[1])

    def statistics(self, block: Block, x: Tensor) -> TokenStatistics:
        """Of the valid tokens of a state as it passed by. One block's output is the next one's input."""
        if self._newest is not None and self._newest[0].is_still(x) and self._newest[1] == block.stack:
            return self._newest[2]
        x_BTD = self.oriented(block, x)
        statistics = token_statistics(x_BTD, self.valid(block, x_BTD))
        self._newest = Seen(x), block.stack, statistics
        return statistics


class Seen:
    """Recognises a tensor without keeping it alive, as long as nobody writes into it."""

    def __init__(self, x: Tensor) -> None:
        self._x = weakref.ref(x)
        self._version = version_of(x)

    def is_still(self, x: Tensor) -> bool:
        return self._x() is x and version_of(x) == self._version


def version_of(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def hidden_state(value: Any) -> Tensor | None:
    """The first tensor with axes (batch, tokens, width) in a module's arguments or output, however they are nested."""
    if isinstance(value, Tensor):
        # A tensor that is spread over processes is not read: its similarity is not that of the part that is here.
        return value if value.ndim == 3 and value.is_floating_point() and not hasattr(value, "to_local") else None
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return None
    return next((x for x in map(hidden_state, value) if x is not None), None)
