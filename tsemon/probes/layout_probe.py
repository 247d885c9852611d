"""Listen to the first attention of each stack of blocks that runs: where its tokens lie, and which form a sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from tsemon.probes.boundaries import before_block
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks
from tsemon.probes.layout import Layouts
from tsemon.probes.packing import Packing
from tsemon.probes.states import hidden_state
from tsemon.probes.tap import AttentionPart, Place, Seen


class LayoutProbe(AttentionPart):
    """Shows states, and the attention on them, to `Layouts`. It measures nothing."""

    disagreements: Mapping[str, Tensor] = {}
    """A text for each two sources, and whether they disagree in this step."""
    TAKES_ROWS = True
    is_needed = False
    """Whether this step measures hidden states."""

    def __init__(self, blocks: list[Block], depth: int, packing: Packing, calls: Calls, layouts: Layouts) -> None:
        self._layouts = layouts
        super().__init__(blocks, depth, packing, calls)

    @property
    def is_wanted(self) -> bool:
        return self.is_needed

    def listen_again(self, hooks: Hooks) -> None:
        """Listen in a pass of tsemon's own, over other sequences."""
        self._layouts.begin()
        self._packing.begin()
        for block in self._blocks:
            before_block(hooks, block, lambda _, args, kwargs, block=block: self.enter(block, args, kwargs))
        self.listen(hooks)

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        if (x := hidden_state((args, kwargs), block.width)) is not None:
            self._layouts.meet_state(block, x)
            self._packing.meet_state(block, x)
        if block.parts is None:
            self._packing.read_names(block.module, args, kwargs)

    def tap(self, hooks: Hooks, block: Block, places: Iterable[Place]) -> AbstractContextManager[None]:
        is_known = self._packing.has_met(block.stack) and not self._layouts.is_open(block)
        return nullcontext() if is_known and not self._packing.compares(block) else super().tap(hooks, block, places)

    def look(self, block: Block, seen: Seen) -> bool:
        if seen.scores is None:
            return False
        self._layouts.meet_attention(block, seen.scores().size)
        return True

    def keep(self) -> None:
        """Remember the findings of the pass that has ended: another one may follow, for saturation."""
        self._how = "; ".join(filter(None, (self._layouts.how(), self._packing.how())))
        self.disagreements = dict(self._packing.disagreements)

    def want(self, names: Collection[str]) -> None:
        super().want(names)
        self._how = ""
        self.disagreements = {}

    def how(self) -> str:
        return self._how

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        return {}
