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
from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks
from tsemon.probes.padding import Padding
from tsemon.probes.part import Part
from tsemon.probes.reading import Reading, by_entry
from tsemon.probes.states import hidden_state

MAX_TOKENS = 64
"""Tokens compared per layer at the most, evenly spread over those of the held sequences that are no padding."""
SCALE, HALF_SCALE = 1024.0, 8.0
"""Powers of two, so that scaling rounds nothing. A block's scores grow with the fourth power of the scale (norm and
projection, of queries and of keys), what it adds to the residual stream with the third, or where it is gated with the
fifth. Float16 ends at 65504: 8^5 leaves room for sums of 2, and 16 overflowed a Llama 256 wide."""


class SaturationProbe(Part):
    """Cosine of each token with itself in the scaled model, entry 0 being the first block's input."""

    METRICS = ("saturation", "saturation_scale")

    def __init__(self, model: nn.Module, blocks: list[Block], depth: int, padding: Padding) -> None:
        super().__init__(blocks, depth)
        self._padding = padding
        self._model = model
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
        self._sums: dict[int, Partials] = {}

    def listen_to_plain(self, hooks: Hooks) -> None:
        """Hook the blocks for the pass of the model as it is."""
        self.forget()
        self._hook(hooks, self._plain_RD, lambda entry, x_RD, _: self._plain_RD.update({entry: x_RD}))

    def listen_to_scaled(self, hooks: Hooks) -> None:
        """Hook the blocks for the pass of the scaled model, the second."""
        self._sums = {}
        self._hook(hooks, self._sums, self._compare)

    def collect(self) -> Partials:
        return by_entry(self._sums, range(self._depth + 1))

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        if "saturation" not in sums:
            return Reading()
        return Reading({"saturation": mean(sums, "saturation")}, scalars={"saturation_scale": self.scale})

    def how(self) -> str:
        return f"parameters times {self.scale:g} in extra passes, eager and in eval mode" if self._sums else ""

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if (missed := len(self._blocks) + 1 - len(self._sums)) == 0:
            return {}
        if len(self._blocks) < self._depth:
            return dict.fromkeys(self.METRICS, "a stage of a pipeline cannot scale the stages before it")
        reason = f"{missed} of {len(self._blocks) + 1} hidden states were not seen in an extra pass of the scaled model"
        return dict.fromkeys(self.METRICS, self.why_not or reason)

    def _hook(self, hooks: Hooks, taken: Mapping[int, Any], take: Take) -> None:
        """Call `take` with each state of the pass, entry by entry; `taken` has those that were taken."""
        first = self._blocks[0]
        layers: dict[nn.Module, list[Block]] = {}
        for block in self._blocks:
            layers.setdefault(block.module, []).append(block)

        def see(block: Block, entries: Iterable[int], value: Any) -> None:
            # The n-th call of a module that several layers share is the n-th of these.
            entry = next((entry for entry in entries if entry not in taken), None)
            if entry is not None and (x := hidden_state(value)) is not None:
                take(entry, *self._rows(block, x))

        hooks.before(first.module, lambda _, args, kwargs: see(first, [first.number], (args, kwargs)))
        for block, *others in layers.values():
            outputs = [layer.number + 1 for layer in (block, *others)]
            if block.deescalation is None:
                hooks.after(block.module, lambda _, args, kwargs, out, b=block, e=outputs: see(b, e, out))
            else:  # as with the other measures of hidden states, the state before that step
                hooks.before(block.deescalation, lambda _, args, kwargs, b=block, e=outputs: see(b, e, (args, kwargs)))

    def _rows(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """A few tokens (R, D), and which of them are tokens at all: there may be fewer."""
        x_BTD = x.detach().transpose(0, 1) if block.tokens_first else x.detach()
        valid_BT = self._padding.valid(block.stack, *x_BTD.shape[:2])
        x_ND = x_BTD.flatten(0, 1)
        if valid_BT is None:
            size = min(x_ND.shape[0], MAX_TOKENS)
            middle_R = torch.arange(size, device=x.device) * 2 + 1
            return x_ND[middle_R * x_ND.shape[0] // (2 * size)], None
        index_R, is_token_R = evenly_spread(valid_BT.flatten(), MAX_TOKENS)
        return x_ND[index_R], is_token_R

    def _compare(self, entry: int, scaled_RD: Tensor, is_token_R: Tensor | None) -> None:
        self._sums[entry] = saturation_sums(self._plain_RD[entry], scaled_RD, is_token_R)


Take = Callable[[int, Tensor, Tensor | None], None]
