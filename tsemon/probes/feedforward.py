"""Listen to the feed-forward part of every block: what its last layer gets.

Axes: B samples, T tokens, F units.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tsemon.measures.feedforward import dead_units
from tsemon.measures.sums import counted
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import (
    Block,
    hides_from_hooks,
    is_linear,
    widths,
)
from tsemon.probes.hooks import Hooks
from tsemon.probes.layout import Layouts
from tsemon.probes.packing import Packing
from tsemon.probes.part import NO_TOKENS, Part, by_reason
from tsemon.probes.stacks import mixers


class FeedForwardProbe(Part):
    """Which feed-forward units never move over all tokens of one forward pass.

    Where dropout stands between the activation and the last layer, a unit that is stuck at anything but zero moves.
    """

    METRICS = ("dead_units",)

    def __init__(self, blocks: list[Block], depth: int, packing: Packing, calls: Calls, layouts: Layouts) -> None:
        self._packing, self._calls, self._layouts = packing, calls, layouts
        super().__init__(blocks, depth)

    def forget(self) -> None:
        super().forget()
        self._undecided: dict[int, str] = {}
        """By block: why the input of the last layer is not measured."""

    def listen(self, hooks: Hooks) -> None:
        self.forget()
        for block in self._calls.to_hook:
            last = last_layer(block)
            if last is not None and not hides_from_hooks(block) and not self._calls.is_compiled(block):
                hooks.before(last, lambda _, args, kwargs, block=block: self._take(block, args))

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        missed = [block for block in self._blocks if block.number not in self._of_layers]
        why = by_reason("units were not seen", missed, len(self._blocks), lambda b: self._why_unseen(b, why_unseen))
        return {"dead_units": why} if why else {}

    def _why_unseen(self, block: Block, why_unseen: str) -> str:
        if block.width is None:
            return "no linear layer of a self-attention was found there, from which their width would be known"
        if (last := last_layer(block)) is None:
            return "no linear layer leads a feed-forward part back to the block's width"
        if why_unseen or (why_unseen := self._calls.why_not_run(block) or ""):
            return why_unseen
        if (why := self._undecided.get(block.number)) is not None:
            return why
        name = next(name for name, module in block.module.named_modules() if module is last)
        return f"the pass did not call {name}, taken for the last feed-forward layer"

    def _take(self, block: Block, args: tuple[Any, ...]) -> None:
        layer = self._calls.current(block)
        if layer is None or layer.number in self._of_layers or not args or not isinstance(args[0], Tensor):
            return
        z = args[0].detach()
        is_of_tokens = self._layouts.are_tokens_of(block, z)
        if is_of_tokens:
            self._layouts.settle(block)
        z_BTF = self._layouts.oriented(block, z) if is_of_tokens else None
        if z_BTF is not None and z_BTF.numel():
            sequences = self._packing.of_others(layer.stack, *z_BTF.shape[:2])
            share = dead_units(z_BTF, None if sequences is None else sequences.valid_BT)
            # Ranks average the share: each unit's range on all of them would be a large message.
            self._of_layers[layer.number] = counted("dead_units", share[None])
        else:
            shape = (
                f"the last feed-forward layer got {tuple(z.shape)}, not (batch, tokens, units), as an expert does not"
            )
            why = self._layouts.why_not(block) if is_of_tokens else shape
            self._undecided.setdefault(layer.number, why if z.numel() else NO_TOKENS)


def last_layer(block: Block) -> nn.Module | None:
    """The widest linear layer that leads back to the block's width and mixes no tokens, the last of several."""
    width, found = block.width, None
    known = () if block.attention is None else (block.attention,)
    mixing = {module for mixer in (*mixers(block.module), *known) for module in mixer.modules()}
    for module in block.module.modules():
        if module in mixing or not is_linear(module):
            continue
        wide, narrow = widths(module)
        if narrow == width and wide != width and (found is None or wide >= widths(found)[0]):
            found = module
    return found
