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
    ATTENTION_NAME,
    Block,
    hidden_width,
    hides_from_hooks,
    is_compiled,
    is_linear,
    widths,
)
from tsemon.probes.hooks import Hooks
from tsemon.probes.padding import Padding
from tsemon.probes.part import Part


class FeedForwardProbe(Part):
    """Which feed-forward units never move over all tokens of one forward pass.

    Where dropout stands between the activation and the last layer, a unit that is stuck at anything but zero moves.
    """

    METRICS = ("dead_units",)

    def __init__(self, blocks: list[Block], depth: int, padding: Padding, calls: Calls) -> None:
        self._padding, self._calls = padding, calls
        super().__init__(blocks, depth)

    def listen(self, hooks: Hooks) -> None:
        self.forget()
        for block in self._calls.to_hook:
            last = last_layer(block)
            if last is not None and not hides_from_hooks(block) and not is_compiled(block.module):
                hooks.before(last, lambda _, args, kwargs, block=block: self._take(block, args))

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if without := [block.name for block in self._blocks if last_layer(block) is None]:
            return {
                "dead_units": f"found no layer that leads a feed-forward part back to the width in {', '.join(without)}"
            }
        if (missed := len(self._blocks) - len(self._of_layers)) == 0:
            return {}
        return {
            "dead_units": f"the last feed-forward layer was not seen in {missed} of {len(self._blocks)} blocks: "
            f"{why_unseen}, or it did not get all tokens as (batch, tokens, units), as an expert does not"
        }

    def _take(self, block: Block, args: tuple[Any, ...]) -> None:
        layer = self._calls.current(block)
        if layer is None or layer.number in self._of_layers or not args or not isinstance(args[0], Tensor):
            return
        z = args[0].detach()
        if z.ndim == 3:
            z_BTF = z.transpose(0, 1) if block.tokens_first else z
            # Ranks average the share: each unit's range on all of them would be a large message.
            share = dead_units(z_BTF, self._padding.valid(layer.stack, *z_BTF.shape[:2]))
            self._of_layers[layer.number] = counted("dead_units", share[None])


def last_layer(block: Block) -> nn.Module | None:
    """The widest linear layer outside attention that leads back to the block's width, the last of several."""
    width, found = hidden_width(block), None
    attentions = set(block.attention.modules()) if block.attention is not None else set[nn.Module]()
    for name, module in block.module.named_modules():
        if module in attentions or not is_linear(module) or ATTENTION_NAME.search(name):
            continue
        wide, narrow = widths(module)
        if narrow == width and wide != width and (found is None or wide >= widths(found)[0]):
            found = module
    return found
