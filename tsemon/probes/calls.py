"""Which layer runs: a module that several layers share is called once for each of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import nn

from tsemon.probes.discovery import Block


class Calls:
    """Counts the calls of blocks in one forward pass. The i-th call of a module is the i-th of the layers that share it."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._layers: defaultdict[nn.Module, list[Block]] = defaultdict(list)
        for block in blocks:
            self._layers[block.module].append(block)
        self._num_calls: Counter[nn.Module] = Counter()

    @property
    def to_hook(self) -> list[Block]:
        """One block of each module, the first."""
        return [layers[0] for layers in self._layers.values()]

    def begin(self) -> None:
        """A forward pass begins."""
        self._num_calls.clear()

    def enter(self, module: nn.Module) -> None:
        """The module is about to run."""
        self._num_calls[module] += 1

    def current(self, block: Block) -> Block | None:
        """The layer as which the block's module runs now, None where it was called more often than layers share it."""
        layers = self._layers[block.module]
        if len(layers) == 1:
            return block  # called again, it is recomputed or tried again
        number = self._num_calls[block.module] - 1
        return layers[number] if 0 <= number < len(layers) else None
