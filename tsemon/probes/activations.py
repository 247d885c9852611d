"""Listen to hidden states: what goes into the first block and what comes out of each.

Axes: B samples, T tokens, D width, K the shorter side of the tokens of which a rank is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.measures.spectra import batch_gram, effective_ranks, token_gram
from tsemon.measures.states import MEANS as STATE_MEANS
from tsemon.measures.states import Batch, state_metrics, state_sums
from tsemon.measures.sums import Partials, counted, mean
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block, hides_from_hooks
from tsemon.probes.hooks import Hooks
from tsemon.probes.part import Part
from tsemon.probes.quantities import with_padding
from tsemon.probes.reading import OnHost, Reading, by_entry, stacked
from tsemon.probes.states import HiddenStates, hidden_state


class ActivationProbe(Part):
    """Token statistics of one forward pass, entry 0 being the first block's input."""

    DEESCALATED = "deescalated_token_similarity"
    RANKS = ("effective_rank", "batch_rank")
    METRICS = (*STATE_MEANS, DEESCALATED, "global_diversity", "hidden_rms", "hidden_max", *RANKS)

    def __init__(self, blocks: list[Block], depth: int, states: HiddenStates, calls: Calls) -> None:
        self._states, self._calls = states, calls
        super().__init__(blocks, depth)

    def forget(self) -> None:
        self._shapes: dict[int, torch.Size] = {}
        self._entries: dict[int, Partials] = {}
        self._deescalated: dict[int, Partials] = {}
        self._grams_KK: dict[str, dict[int, Tensor]] = {name: {} for name in self.RANKS}
        self._states.forget()

    def listen(self, hooks: Hooks) -> None:
        """Hook the blocks for the pass that begins."""
        self.forget()
        for block in self._calls.to_hook:
            if hides_from_hooks(block):
                continue
            if isinstance(block.attention, nn.MultiheadAttention) and not block.attention.batch_first:
                hooks.before(block.attention, lambda _, args, kwargs, block=block: self._check_axes(block, args))
            if block.deescalation is None:
                hooks.after(block.module, lambda _, args, kwargs, output, block=block: self._take_output(block, output))
            else:
                # What the block computed stands before the operator: after it with tau = 1 the similarity is always 0.
                hooks.before(
                    block.deescalation, lambda _, args, kwargs, block=block: self._take_output(block, (args, kwargs))
                )
                hooks.after(
                    block.deescalation,
                    lambda _, args, kwargs, output, block=block: self._take_deescalated(block, output),
                )

    def enter(self, block: Block, args: Any, kwargs: Any) -> None:
        """Take the first block's input from its arguments, and the inputs of all blocks for the user's own quantities."""
        if block is self._blocks[0]:
            self._take(block.number, block, (args, kwargs))
        if self.own.of("input") and (x := hidden_state((args, kwargs))) is not None:
            x_BTD = self._states.oriented(block, x)
            self.own.see("input", block.number, *with_padding(x_BTD, self._states.valid(block, x_BTD)))

    def collect(self) -> Partials:
        entries = range(self._depth + 1)
        return by_entry(self._entries, entries) | by_entry(self._deescalated, entries[1:])

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        reading = Reading(dict(state_metrics(sums)))
        if self.DEESCALATED in sums:
            reading.layers[self.DEESCALATED] = mean(sums, self.DEESCALATED)
        for name, grams_KK in self._grams_KK.items():
            if grams_KK:
                gram_LKK = stacked(grams_KK.get(entry) for entry in range(self._depth + 1))
                reading.layers[name] = OnHost(gram_LKK, effective_ranks)
        return reading

    def how(self) -> str:
        if not self._shapes:
            return ""
        shape = next(iter(self._shapes.values()))
        return f"{len(self._entries)} of {self._num_entries} hidden states of shape {tuple(shape)}"

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if (missed := self._num_entries - len(self._entries)) == 0:
            return {}
        return dict.fromkeys(
            self.METRICS,
            f"{missed} of {self._num_entries} hidden states were not seen: {why_unseen}, or the block passed no tensor of "
            "shape (batch, tokens, width)",
        )

    @property
    def _num_entries(self) -> int:
        return len(self._blocks) + 1

    def _take_output(self, block: Block, value: Any) -> None:
        if (layer := self._calls.current(block)) is not None:
            self._take(layer.number + 1, layer, value)

    def _take(self, entry: int, block: Block, value: Any) -> None:
        # A block that runs again in the same pass is recomputed.
        if entry in self._shapes or (x := hidden_state(value)) is None:
            return
        self._shapes[entry] = x.shape
        x_BTD = self._states.oriented(block, x)
        if self.own.of("output"):
            self.own.see_state(entry, x_BTD, self._states.valid(block, x_BTD))
        if not self.wanted:
            return
        statistics = self._states.statistics(block, x)
        batch = Batch.of(statistics)
        self._entries[entry] = state_sums(statistics, batch, x.shape[-1])
        if "effective_rank" in self.wanted:
            gram_KK = token_gram(x_BTD, self._states.valid(block, x_BTD), statistics.unit, batch.counts_B)
            self._grams_KK["effective_rank"][entry] = gram_KK
        if "batch_rank" in self.wanted:
            self._grams_KK["batch_rank"][entry] = batch_gram(batch.mean_BD, batch.counts_B)

    def _take_deescalated(self, block: Block, value: Any) -> None:
        layer = self._calls.current(block)
        if layer is None or layer.number + 1 in self._deescalated or (x := hidden_state(value)) is None:
            return
        self._deescalated[layer.number + 1] = counted(self.DEESCALATED, self._states.statistics(layer, x).similarity)

    def _check_axes(self, block: Block, args: tuple[Any, ...]) -> None:
        """A block may turn its batch-first states round for an attention that wants tokens first."""
        layer = self._calls.current(block)
        came = self._shapes.get(block.number if layer is None else layer.number)
        if (
            self._states.has_tokens_first(block)
            and came is not None
            and args
            and isinstance(args[0], Tensor)
            and args[0].shape != came
        ):
            self._states.turn_round()
            # Measured before this could be known; right from the next on.
            first = self._blocks[0].number
            self._entries.pop(first, None)
            self._shapes.pop(first, None)
            self.own.drop(first)
