"""Listen to hidden states: what goes into the first block of each stack, and what comes out of each block.

Axes: B samples, T tokens, D width, K the shorter side of the tokens of which a rank is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Size, Tensor

from tsemon.measures.spectra import batch_gram, effective_ranks
from tsemon.measures.states import MEANS as STATE_MEANS
from tsemon.measures.states import Batch, state_metrics, state_sums
from tsemon.measures.sums import Partials, counted, mean
from tsemon.measures.tokens import TokenStatistics, similarity
from tsemon.probes.boundaries import after_block, why_no_end
from tsemon.probes.calls import Calls
from tsemon.probes.deferred import Deferred
from tsemon.probes.depth import firsts_of
from tsemon.probes.discovery import Block, hides_from_hooks
from tsemon.probes.hooks import Hooks
from tsemon.probes.part import SINGLE_TOKEN, Part
from tsemon.probes.quantities import with_padding
from tsemon.probes.reading import OnHost, Reading, stacked
from tsemon.probes.states import NO_STATE, HiddenStates, hidden_state
from tsemon.stacks import Stacks

OF_SEVERAL_TOKENS = ("cosine_similarity", "first_hidden_norm_ratio")
OF_SEVERAL_SEQUENCES = ("batch_similarity", "centred_token_similarity", "batch_rank")


def _sums_of_states(fields: tuple[Tensor, ...], width: int) -> Partials:
    statistics = TokenStatistics(*fields)
    return state_sums(statistics, Batch.of(statistics), width)


def _deescalated(lengths_NB: tuple[Tensor, ...], _: object) -> Partials:
    return counted(ActivationProbe.DEESCALATED, similarity(*lengths_NB))


class ActivationProbe(Part):
    """Token statistics of one forward pass. In each stack, the entry of its input is before the entries of its blocks."""

    DEESCALATED = "deescalated_token_similarity"
    RANKS = ("effective_rank", "batch_rank")
    METRICS = (*STATE_MEANS, DEESCALATED, "global_diversity", "hidden_rms", "hidden_max", *RANKS)

    def __init__(self, blocks: list[Block], stacks: Stacks, states: HiddenStates, calls: Calls) -> None:
        self._states, self._calls = states, calls
        self._firsts = firsts_of(blocks)
        self._all_entries = range(stacks.num_states)
        super().__init__(blocks, stacks.num_blocks)

    def forget(self) -> None:
        self._shapes: dict[int, Size] = {}
        self._sequences: tuple[int, int, bool] | None = None
        """Rows and tokens of the newest state, and whether rows may hold several documents."""
        self._undecided: dict[int, str] = {}
        """By entry: the reason why its layout was not known."""
        self._waiting: list[tuple[Block, Tensor]] = []
        """Copies of inputs: it takes the block's attention to tell how they lie."""
        self._entries, self._deescalated = Deferred(_sums_of_states), Deferred(_deescalated)
        self._grams_KK: dict[str, dict[int, Tensor]] = {name: {} for name in self.RANKS}
        self._states.forget()

    def listen(self, hooks: Hooks) -> None:
        """Hook the blocks for the pass that begins."""
        self.forget()
        for block in self._calls.to_hook:
            if hides_from_hooks(block):
                continue
            if block.deescalation is None:
                after_block(hooks, block, lambda _, args, kwargs, output, block=block: self._take_output(block, output))
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
        """Take the input of each stack from its first block, and the inputs of all blocks for the user's own quantities."""
        if block not in self._firsts and not self.own.of("input"):
            return
        if (x := hidden_state((args, kwargs), block.width)) is None:
            return
        if (copy := self._states.kept(block, x)) is not None:
            self._waiting.append((block, copy))
        else:
            self._take_input(block, x)

    def collect(self) -> Partials:
        for block in self._blocks:
            if why := self._states.why_undecided(block):  # it turned out too late for some
                self._forget_entries(block, why)
        return self._entries.collect(len(self._all_entries)) | self._deescalated.collect(self._depth)

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        reading = Reading(dict(state_metrics(sums)))
        if self.DEESCALATED in sums:
            reading.layers[self.DEESCALATED] = mean(sums, self.DEESCALATED)
        for name, grams_KK in self._grams_KK.items():
            if grams_KK:
                gram_LKK = stacked(grams_KK.get(entry) for entry in self._all_entries)
                reading.layers[name] = OnHost(gram_LKK, effective_ranks)
        return reading

    def how(self) -> str:
        if not self._shapes:
            return ""
        shape = next(iter(self._shapes.values()))
        return f"{len(self._entries)} of {self._num_entries} hidden states of shape {tuple(shape)}"

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        if (no_end := why_no_end(self._blocks, self._entries)) is not None:
            return dict.fromkeys(self.METRICS, no_end)
        expected = [*((block.entry - 1, block) for block in self._firsts), *((b.entry, b) for b in self._blocks)]
        missed = [(entry, block) for entry, block in expected if entry not in self._shapes]
        reasons = Counter(
            self._undecided.get(entry) or why_unseen or self._calls.why_not_run(block) or NO_STATE
            for entry, block in missed
        )
        why = (f"{num} of {self._num_entries} hidden states were not seen: {why}" for why, num in reasons.items())
        return dict.fromkeys(self.METRICS, "; ".join(why)) if missed else self._why_undefined()

    def _why_undefined(self) -> dict[str, str]:
        batch, tokens, is_packed = self._sequences or (0, 0, False)
        found = dict.fromkeys(OF_SEVERAL_TOKENS, SINGLE_TOKEN) if tokens == 1 else {}
        if batch == 1 and not is_packed:
            found |= dict.fromkeys(OF_SEVERAL_SEQUENCES, "the batch has one sequence, and no other to compare it with")
        return found

    @property
    def _num_entries(self) -> int:
        return len(self._blocks) + len(self._firsts)

    def _take_output(self, block: Block, value: Any) -> None:
        if (layer := self._calls.current(block)) is not None:
            self._states.settle(layer)
            waiting, self._waiting = self._waiting, []
            for earlier, x in waiting:
                if earlier.stack == layer.stack:
                    self._take_input(earlier, x)
                else:
                    self._waiting.append((earlier, x))
            if (state := hidden_state(value, block.width, self._states.layouts.shape_of(block))) is not None:
                self._take(layer.entry, layer, state)

    def _take_input(self, block: Block, x: Tensor) -> None:
        if block in self._firsts:
            self._take(block.entry - 1, block, x)
        if not self.own.of("input") or (x_BTD := self._states.oriented(block, x)) is None:
            return
        if (sequences := self._states.sequences(block, x_BTD)) is not None:
            self.own.see("input", block.number, *with_padding(x_BTD, sequences.valid_BT))

    def _take(self, entry: int, block: Block, x: Tensor) -> None:
        if entry in self._shapes:  # a block that runs again in the same pass is recomputed
            return
        x_BTD = self._states.oriented(block, x)
        sequences = None if x_BTD is None else self._states.sequences(block, x_BTD)
        if x_BTD is None or sequences is None:
            self._undecided[entry] = self._states.why_undecided(block)
            return
        self._shapes[entry] = x.shape
        self._sequences = *x_BTD.shape[:2], sequences.documents_BT is not None
        if self.own.of("output"):
            self.own.see_state(entry, block, x_BTD, sequences.valid_BT)
        if not self.wanted:
            return
        if (statistics := self._states.statistics(block, x)) is None:
            return
        self._entries.put(entry, statistics.fields, x_BTD.shape[-1], key=x_BTD.shape[-1])
        if not self.wanted & {*self.RANKS}:
            return
        batch = Batch.of(statistics)
        if "effective_rank" in self.wanted:
            self._grams_KK["effective_rank"][entry] = sequences.gram(x_BTD, statistics.unit, batch.counts_B)
        if "batch_rank" in self.wanted:
            self._grams_KK["batch_rank"][entry] = batch_gram(batch.mean_BD, batch.counts_B)

    def _take_deescalated(self, block: Block, value: Any) -> None:
        layer = self._calls.current(block)
        if (
            layer is None
            or layer.number in self._deescalated
            or (x := hidden_state(value, block.width, self._states.layouts.shape_of(block))) is None
        ):
            return
        if (statistics := self._states.statistics(layer, x)) is not None:
            self._deescalated.put(layer.number, (statistics.shared, statistics.own))

    def _forget_entries(self, block: Block, why: str) -> None:
        self._deescalated.drop(block.number)
        self.own.drop(block)
        for entry in [block.entry - 1] * (block in self._firsts) + [block.entry]:
            self._undecided[entry] = why
            self._shapes.pop(entry, None)
            self._entries.drop(entry)
            for grams_KK in self._grams_KK.values():
                grams_KK.pop(entry, None)
