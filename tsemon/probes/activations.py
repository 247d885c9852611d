"""Listen to hidden states: what goes into the first block and what comes out of each.

Axes: B samples, T tokens, D width, K the shorter side of the tokens of which a rank is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tsemon.measures import TokenStatistics
from tsemon.measures.linear import ratio
from tsemon.measures.spectra import batch_gram, effective_ranks, token_gram
from tsemon.probes.calls import Calls
from tsemon.probes.discovery import Block, hides_from_hooks
from tsemon.probes.hooks import Hooks
from tsemon.probes.part import COUNT, OnHost, Part, Partial, Reading, counted, mean, stacked
from tsemon.probes.states import HiddenStates, hidden_state


class ActivationProbe(Part):
    """Token statistics of one forward pass, entry 0 being the first block's input."""

    DEESCALATED = "deescalated_token_similarity"
    MEANS = (
        "token_similarity",
        "token_diversity",
        "centred_token_similarity",
        "cosine_similarity",
        "hfc_lfc",
        "first_hidden_norm_ratio",
        "batch_similarity",
        "nonfinite",
        DEESCALATED,
    )
    """Those that are a mean over samples; `batch_similarity` over processes, each with a batch of its own."""
    RANKS = ("effective_rank", "batch_rank")
    METRICS = (*MEANS, "global_diversity", "hidden_rms", "hidden_max", *RANKS)

    def __init__(self, blocks: list[Block], depth: int, states: HiddenStates, calls: Calls) -> None:
        self._blocks = blocks
        self._depth = depth
        self._states = states
        self._calls = calls
        self._shapes: dict[int, torch.Size] = {}
        self._entries: dict[int, dict[str, Tensor]] = {}
        self._deescalated: dict[int, dict[str, Tensor]] = {}
        self._grams_KK: dict[str, dict[int, Tensor]] = {}

    def forget(self) -> None:
        self._shapes, self._entries, self._deescalated = {}, {}, {}
        self._grams_KK = {name: {} for name in self.RANKS}
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
        """Take the first block's input from its arguments."""
        if block is self._blocks[0]:
            self._take(block.number, block, (args, kwargs))

    def collect(self) -> dict[str, Partial]:
        found: dict[str, Partial] = {}
        for entries, first in ((self._entries, 0), (self._deescalated, 1)):
            for name in {name for sums in entries.values() for name in sums}:
                values = [entries.get(entry, {}).get(name) for entry in range(first, self._depth + 1)]
                is_max = name == "hidden_max"
                found[name] = Partial(stacked(values, -math.inf), "max") if is_max else Partial(stacked(values))
        return found

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        reading = Reading(dict(_metrics(sums)))
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
        if entry in self._entries or (x := hidden_state(value)) is None:
            return
        self._shapes[entry] = x.shape
        statistics = self._states.statistics(block, x)
        batch = _batch(statistics)
        self._entries[entry] = _sums(statistics, width=x.shape[-1])
        x_BTD = self._states.oriented(block, x)
        if "effective_rank" in self.wanted:
            gram_KK = token_gram(x_BTD, self._states.valid(block, x_BTD), statistics.scale, batch.counts_B)
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
            self._entries.pop(self._blocks[0].number, None)


ENERGY = "energy"
"""Of the hidden states, over tokens and width: the root of its mean is `hidden_rms`."""
OWN_ENERGY = "own_energy"
"""The part of it around the mean token of the batch. Each process has a batch of its own."""


class _Batch(NamedTuple):
    """The samples of a batch in units of its largest entry, so that no square overflows; zeros where one does not count."""

    counts_B: Tensor
    """Which samples are finite and not all padding."""
    count_B: Tensor
    """Number of tokens."""
    scale: Tensor
    unit_B: Tensor
    mean_BD: Tensor


def _batch(stats: TokenStatistics) -> _Batch:
    counts_B = stats.scale.isfinite() & (stats.count > 0)
    scale = torch.where(counts_B, stats.scale, 0.0).amax()
    unit_B = torch.where(counts_B, stats.scale / torch.where(scale > 0, scale, 1.0), 0.0)
    return _Batch(
        counts_B=counts_B,
        count_B=torch.where(counts_B, stats.count, 0.0),
        scale=scale,
        unit_B=unit_B,
        mean_BD=torch.where(counts_B[:, None], stats.mean_token, 0.0) * unit_B[:, None],
    )


def _sums(stats: TokenStatistics, width: int) -> dict[str, Tensor]:
    """Sums over samples of each sample's ratio; a sample that is not finite, or all padding, does not count."""
    batch = _batch(stats)
    counts_B, count_B, mean_BD = batch.counts_B, batch.count_B, batch.mean_BD
    own_B = torch.where(counts_B, stats.own, 0.0) * batch.unit_B.square()
    energy = (torch.where(counts_B, stats.shared, 0.0) * batch.unit_B.square() + own_B).sum()
    common_D = (mean_BD * count_B[:, None]).sum(dim=0) / count_B.sum()
    centred_B = count_B * (mean_BD - common_D).square().sum(dim=-1)
    own_energy = torch.where(counts_B, centred_B + own_B, 0.0).sum()
    # One sample is its own mean: nothing is left of it to be shared.
    centred_B = torch.where(counts_B & (counts_B.sum() > 1), centred_B / (centred_B + own_B), torch.nan)
    squared = batch.scale.double().square()  # the square of 1e20 is no float32
    return {
        **counted("token_similarity", stats.similarity),
        **counted("token_diversity", stats.diversity),
        **counted("centred_token_similarity", centred_B),
        **counted("cosine_similarity", stats.cosine),
        **counted("hfc_lfc", ratio(stats.own, stats.shared).sqrt()),
        **counted("first_hidden_norm_ratio", stats.first_ratio),
        **counted("batch_similarity", _batch_similarity(batch)[None]),
        **counted("nonfinite", 1 - stats.scale.isfinite().to(stats.scale.dtype)),
        "hidden_max": torch.where(counts_B, stats.scale, -math.inf).amax(),
        OWN_ENERGY: squared * own_energy,
        ENERGY: squared * energy,
        ENERGY + COUNT: count_B.sum().double() * width,
    }


def _batch_similarity(batch: _Batch) -> Tensor:
    """Token similarity of the matrix of mean tokens; one alone has nobody to share with."""
    count = batch.counts_B.sum()
    mean_D = batch.mean_BD.sum(dim=0) / count
    own_BD = torch.where(batch.counts_B[:, None], batch.mean_BD - mean_D, 0.0)
    shared = count * mean_D.square().sum()
    return torch.where(count > 1, shared / (shared + own_BD.square().sum()), torch.nan)


def _metrics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `_sums`, those of all ranks together, come to."""
    found = {name: mean(sums, name) for name in ActivationProbe.MEANS if name in sums}
    if ENERGY in sums:
        found["global_diversity"] = (sums[OWN_ENERGY] / sums[ENERGY]).float()
        found["hidden_rms"] = mean(sums, ENERGY).sqrt().float()
        found["hidden_max"] = torch.where(sums["hidden_max"].isfinite(), sums["hidden_max"], torch.nan)
    return found
