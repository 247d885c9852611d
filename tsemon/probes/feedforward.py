"""Listen to the feed-forward part of every block: what its last layer gets.

Axes: B samples, T tokens, F units, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
from tsemon.probes.part import Part, Partial, Reading, counted, mean, stacked


class FeedForwardProbe(Part):
    """Which feed-forward units never move over all tokens of one forward pass.

    Where dropout stands between the activation and the last layer, a unit that is stuck at anything but zero moves.
    """

    METRICS = ("dead_units",)

    def __init__(self, blocks: list[Block], depth: int, padding: Padding, calls: Calls) -> None:
        self._blocks = blocks
        self._depth = depth
        self._padding = padding
        self._calls = calls
        self._dead: dict[int, dict[str, Tensor]] = {}

    def forget(self) -> None:
        self._dead = {}

    def listen(self, hooks: Hooks) -> None:
        self.forget()
        for block in self._calls.to_hook:
            last = last_layer(block)
            if last is not None and not hides_from_hooks(block) and not is_compiled(block.module):
                hooks.before(last, lambda _, args, kwargs, block=block: self._take(block, args))

    def collect(self) -> dict[str, Partial]:
        return {
            name: Partial(stacked(self._dead.get(layer, {}).get(name) for layer in range(self._depth)))
            for name in {name for sums in self._dead.values() for name in sums}
        }

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        return Reading({"dead_units": mean(sums, "dead_units")} if "dead_units" in sums else {})

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if without := [block.name for block in self._blocks if last_layer(block) is None]:
            return {
                "dead_units": f"found no layer that leads a feed-forward part back to the width in {', '.join(without)}"
            }
        if (missed := len(self._blocks) - len(self._dead)) == 0:
            return {}
        return {
            "dead_units": f"the last feed-forward layer was not seen in {missed} of {len(self._blocks)} blocks: "
            f"{why_unseen}, or it did not get all tokens as (batch, tokens, units), as an expert does not"
        }

    def _take(self, block: Block, args: tuple[Any, ...]) -> None:
        layer = self._calls.current(block)
        if layer is None or layer.number in self._dead or not args or not isinstance(args[0], Tensor):
            return
        z = args[0].detach()
        if z.ndim == 3:
            share = self._dead_share(layer, z.transpose(0, 1) if block.tokens_first else z)
            self._dead[layer.number] = counted("dead_units", share)

    def _dead_share(self, block: Block, z_BTF: Tensor) -> Tensor:
        """Of the units, over valid tokens of samples that are finite. Ranks average it: each unit's range on all of them
        would be a large message."""
        valid_BT = self._padding.valid(block.stack, *z_BTF.shape[:2])
        if valid_BT is None:
            lowest_BF, highest_BF = z_BTF.amin(dim=1), z_BTF.amax(dim=1)
            count_B = z_BTF.new_full(z_BTF.shape[:1], z_BTF.shape[1], dtype=torch.float32)
        else:
            lowest_BF = torch.where(valid_BT[..., None], z_BTF, math.inf).amin(dim=1)
            highest_BF = torch.where(valid_BT[..., None], z_BTF, -math.inf).amax(dim=1)
            count_B = valid_BT.sum(dim=1, dtype=torch.float32)
        counts_B = lowest_BF.isfinite().all(dim=1) & highest_BF.isfinite().all(dim=1)
        highest_F = torch.where(counts_B[:, None], highest_BF, -math.inf).amax(dim=0)
        lowest_F = torch.where(counts_B[:, None], lowest_BF, math.inf).amin(dim=0)
        share = (highest_F == lowest_F).float().mean()
        return torch.where(torch.where(counts_B, count_B, 0.0).sum() > 1, share, torch.nan)  # one token cannot move


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
