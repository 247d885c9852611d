"""Which layer runs: a module that several layers share is called once for each of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import nn

from tsemon.probes.discovery import Block, hides_from_hooks, is_compiled


class Calls:
    """Counts the calls of blocks in one forward pass. The i-th call of a module is the i-th of the layers that share it."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._layers: defaultdict[nn.Module, list[Block]] = defaultdict(list)
        for block in blocks:
            self._layers[block.module].append(block)
        self._num_calls: Counter[nn.Module] = Counter()
        self._hidden = set[int]()
        """Blocks that ran where a hook would have changed how they are computed."""
        self._compiled = set[int]()

    @property
    def to_hook(self) -> list[Block]:
        """One block of each module, the first."""
        return [layers[0] for layers in self._layers.values()]

    def begin(self) -> None:
        """A forward pass begins."""
        self._num_calls.clear()
        self._hidden = {block.number for of in self._layers.values() for block in of if hides_from_hooks(block)}
        self.find_compiled()

    def find_compiled(self) -> bool:
        """Whether any block is compiled by now, in whole or in part."""
        blocks = (block for layers in self._layers.values() for block in layers)
        self._compiled = {block.number for block in blocks if is_compiled(block.module)}
        return bool(self._compiled)

    def is_compiled(self, block: Block) -> bool:
        """Whether it was compiled when this was looked at last, at the beginning of the pass."""
        return block.number in self._compiled

    def enter(self, module: nn.Module) -> None:
        """The module is about to run."""
        self._num_calls[module] += 1

    def has_entered(self, block: Block) -> bool:
        """True if the block's module has run, or runs, in this pass."""
        return self._num_calls[block.module] > 0

    def current(self, block: Block) -> Block | None:
        """The layer as which the block's module runs now, None where it was called more often than layers share it."""
        layers = self._layers[block.module]
        if len(layers) == 1:
            return block  # called again, it is recomputed or tried again
        number = self._num_calls[block.module] - 1
        return layers[number] if 0 <= number < len(layers) else None

    def why_not_run(self, block: Block) -> str | None:
        """Why the newest pass showed nothing of the block; None if it showed that the block ran."""
        if block.number in self._hidden:
            return FUSED
        number = self._layers[block.module].index(block)
        if self._num_calls[block.module] > number:
            return None
        if self._num_calls[block.module]:
            return f"the pass called {type(block.module).__name__}, which they share, fewer times"
        return f"the pass did not call {type(block.module).__name__} (skipped, or run by another method than forward)"


FUSED = "PyTorch's fused kernel runs it, as it is frozen in eval mode; a hook inside would switch the kernel off"
