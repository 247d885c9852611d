"""Listen to hidden states in two passes over the same sequences: as the model is, and with its parameters scaled up.

Axes: B samples, T tokens, N tokens of all samples, R of them that are compared, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.measures.choosing import evenly_spread
from tsemon.measures.saturation import saturation_sums
from tsemon.measures.sums import Partials, mean
from tsemon.probes.boundaries import after_block, before_block, why_no_end
from tsemon.probes.depth import firsts_of
from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks
from tsemon.probes.layout import Found, Layouts, turned
from tsemon.probes.packing import Packing
from tsemon.probes.part import Part
from tsemon.probes.reading import OnHost, Reading, by_entry
from tsemon.probes.states import NO_STATE, hidden_state
from tsemon.stacks import Stacks

MAX_TOKENS = 64
"""Tokens compared per layer at the most, evenly spread over those of the held sequences that are no padding."""
SCALE, HALF_SCALE = 1024.0, 8.0
"""Powers of two, so that scaling rounds nothing. A block's scores grow with the fourth power of the scale (norm and
projection, of queries and of keys), what it adds to the residual stream with the third, or where it is gated with the
fifth. Float16 ends at 65504: 8^5 leaves room for sums of 2, and 16 overflowed a Llama 256 wide."""


class SaturationProbe(Part):
    """Cosine of each token with itself in the scaled model, at the input of each stack and the output of each block."""

    METRICS = ("saturation", "saturation_scale")

    def __init__(
        self, model: nn.Module, blocks: list[Block], stacks: Stacks, packing: Packing, layouts: Layouts
    ) -> None:
        super().__init__(blocks, stacks.num_blocks)
        self._num_entries = stacks.num_states
        self._packing, self._layouts = packing, layouts
        self._model = model
        self._num_undefined = 0
        """NaNs in the newest frame."""
        self.why_not: str | None = None
        """Why the passes did not come about."""

    @property
    def needs_passes(self) -> bool:
        """Whether this step should measure it: not of a pipeline's stage, which cannot scale the stages before it."""
        return bool(self.wanted) and len(self._blocks) == self._depth

    @property
    def scale(self) -> float:
        return HALF_SCALE if any(p.dtype == torch.float16 for p in self._model.parameters()) else SCALE

    def forget(self) -> None:
        self._plain_RD: dict[int, Tensor] = {}
        self._found: dict[int, Found | None] = {}
        """Layout by stack, the same in both passes."""
        self._sums: dict[int, Partials] = {}
        self._waiting: list[tuple[int, Block, Tensor]] = []
        """Copies of inputs: it takes the block's attention to tell which tokens are padding."""

    def listen_to_plain(self, hooks: Hooks) -> None:
        """Hook the blocks for the pass of the model as it is."""
        self.forget()
        self._hook(hooks, self._plain_RD, self._keep)

    def listen_to_scaled(self, hooks: Hooks) -> None:
        """Hook the blocks for the pass of the scaled model, the second."""
        self._sums = {}
        self._take_waiting(self._keep)  # no output came behind them
        self._hook(hooks, self._sums, self._compare)

    def collect(self) -> Partials:
        return by_entry(self._sums, range(self._num_entries))

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if "saturation" not in sums:
            return Reading()
        value, reading = mean(sums, "saturation"), Reading(scalars={"saturation_scale": self.scale})
        is_on_host = value.device.type == "cpu"
        reading.layers["saturation"] = (
            self._counted(value) if is_on_host else OnHost(value, self._counted, is_merged=True)
        )
        return reading

    def _counted(self, value: Tensor) -> Tensor:
        """The same. On other devices the reason for its NaNs comes one sample late."""
        self._num_undefined = int(value.isnan().sum())
        return value

    def how(self) -> str:
        return f"parameters times {self.scale:g} in extra passes, eager and in eval mode" if self._sums else ""

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if len(self._blocks) < self._depth:
            return dict.fromkeys(self.METRICS, "a stage of a pipeline cannot scale the stages before it")
        if (missed := self._num_entries - len(self._sums)) == 0:
            text = f"{self._num_undefined} hidden states are not finite, or zero, with parameters times {self.scale:g}"
            return {"saturation": text} if self._num_undefined else {}
        reason = f"{missed} of {self._num_entries} hidden states were not seen in an extra pass of the scaled model: "
        reason += f"{NO_STATE}, or the pass did not call it"
        return dict.fromkeys(self.METRICS, self.why_not or why_no_end(self._blocks, self._sums) or reason)

    def _hook(self, hooks: Hooks, taken: Mapping[int, Any], take: Take) -> None:
        """Call `take` with each state of the pass, entry by entry; `taken` has those that were taken."""
        layers: dict[nn.Module, list[Block]] = {}
        for block in self._blocks:
            layers.setdefault(block.module, []).append(block)

        def see(block: Block, entries: Iterable[int], value: Any) -> None:
            shape = self._layouts.shape_of(block)
            # The n-th call of a module that several layers share is the n-th of these.
            entry = next((entry for entry in entries if entry not in taken), None)
            if entry is None or (x := hidden_state(value, block.width, shape)) is None:
                return
            if entry < block.entry and self._packing.waits_for_attention(block):
                self._waiting.append((entry, block, x.detach().clone()))
                return
            self._packing.settle(block)
            self._take_waiting(take, block.stack)
            take(entry, *self._rows(block, x))

        for first in firsts_of(self._blocks):
            before_block(hooks, first, lambda _, args, kwargs, b=first: see(b, [b.entry - 1], (args, kwargs)))
        for block, *others in layers.values():
            outputs = [layer.entry for layer in (block, *others)]
            if block.deescalation is None:
                after_block(hooks, block, lambda _, args, kwargs, out, b=block, e=outputs: see(b, e, out))
            else:  # as with the other measures of hidden states, the state before that step
                hooks.before(block.deescalation, lambda _, args, kwargs, b=block, e=outputs: see(b, e, (args, kwargs)))

    def _take_waiting(self, take: Take, stack: int | None = None) -> None:
        """Take the inputs that wait, of one stack or of all."""
        waiting, self._waiting = self._waiting, []
        for entry, block, x in waiting:
            if stack in (None, block.stack):
                take(entry, *self._rows(block, x))
            else:
                self._waiting.append((entry, block, x))

    def _rows(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """A few tokens (R, D), and which of them are tokens at all: there may be fewer."""
        # Each token is compared with itself. While the layout is not known, it is only padding that cannot be told.
        layout = self._found.setdefault(block.stack, self._layouts.of(block))
        x_BTD = None if layout is None else turned(x.detach(), layout)
        sequences = None if x_BTD is None else self._packing.of(block.stack, *x_BTD.shape[:2])
        valid_BT = None if sequences is None else sequences.valid_BT
        x_ND = (x.detach() if x_BTD is None else x_BTD).flatten(0, -2)
        if valid_BT is None:
            size = min(x_ND.shape[0], MAX_TOKENS)
            middle_R = torch.arange(size, device=x.device) * 2 + 1
            return x_ND[middle_R * x_ND.shape[0] // (2 * size)], None
        index_R, is_token_R = evenly_spread(valid_BT.flatten(), MAX_TOKENS)
        return x_ND[index_R], is_token_R

    def _keep(self, entry: int, plain_RD: Tensor, is_token_R: Tensor | None) -> None:
        self._plain_RD[entry] = plain_RD

    def _compare(self, entry: int, scaled_RD: Tensor, is_token_R: Tensor | None) -> None:
        self._sums[entry] = saturation_sums(self._plain_RD[entry], scaled_RD, is_token_R)


Take = Callable[[int, Tensor, Tensor | None], None]
