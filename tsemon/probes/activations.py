"""Listen to hidden states: what goes into the first block and what comes out of each.

Axes: B samples, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.measures import TokenStatistics, token_statistics
from tsemon.probes.discovery import Block, may_take_fast_path
from tsemon.probes.hooks import Hooks
from tsemon.probes.padding import Padding
from tsemon.probes.part import COUNT, Part, Partial, Reading, counted, mean, stacked


class ActivationProbe(Part):
    """Token statistics of one forward pass, entry 0 being the first block's input."""

    DEESCALATED = "deescalated_token_similarity"
    METRICS = (
        "token_similarity",
        "token_diversity",
        "centred_token_similarity",
        "cosine_similarity",
        "hidden_rms",
        "nonfinite",
        DEESCALATED,
    )

    def __init__(self, blocks: list[Block], depth: int, padding: Padding) -> None:
        self._blocks = blocks
        self._depth = depth
        self._padding = padding
        self._tokens_first = {block.number for block in blocks if block.tokens_first}
        self._shapes: dict[int, torch.Size] = {}
        self._entries: dict[int, dict[str, Tensor]] = {}
        self._deescalated: dict[int, dict[str, Tensor]] = {}

    def forget(self) -> None:
        self._shapes, self._entries, self._deescalated = {}, {}, {}

    def listen(self, hooks: Hooks) -> None:
        """Hook the blocks for the pass that begins."""
        self.forget()
        for block in self._blocks:
            if isinstance(block.module, nn.TransformerEncoderLayer) and may_take_fast_path(block.module):
                continue  # a hook on it, or in it, would send it another way
            if block is self._blocks[0]:
                hooks.before(block.module, lambda _, args, kwargs: self.take_input(args, kwargs))
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

    def take_input(self, args: Any, kwargs: Any) -> None:
        """Take the first block's input from its arguments."""
        first = self._blocks[0]
        self._take(first.number, first, (args, kwargs))

    def collect(self) -> dict[str, Partial]:
        found: dict[str, Partial] = {}
        for entries, first in ((self._entries, 0), (self._deescalated, 1)):
            for name in {name for sums in entries.values() for name in sums}:
                values = [entries.get(entry, {}).get(name) for entry in range(first, self._depth + 1)]
                found[name] = Partial(stacked(values))
        return found

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        return Reading(dict(_metrics(sums)))

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
        self._take(block.number + 1, block, value)

    def _take(self, entry: int, block: Block, value: Any) -> None:
        # A block that runs again in the same pass is recomputed, or shared by several layers.
        if entry not in self._entries and (x_BTD := self._hidden_state(entry, block, value)) is not None:
            self._entries[entry] = _sums(token_statistics(x_BTD, self._valid(block, x_BTD)), width=x_BTD.shape[-1])

    def _take_deescalated(self, block: Block, value: Any) -> None:
        entry = block.number + 1
        if entry not in self._deescalated and (x_BTD := self._hidden_state(entry, block, value)) is not None:
            stats = token_statistics(x_BTD, self._valid(block, x_BTD))
            self._deescalated[entry] = counted(self.DEESCALATED, stats.similarity)

    def _hidden_state(self, entry: int, block: Block, value: Any) -> Tensor | None:
        x = _first_hidden_state(value)
        if x is None:
            return None
        self._shapes[entry] = x.shape
        x = x.detach()
        return x.transpose(0, 1) if block.number in self._tokens_first else x

    def _check_axes(self, block: Block, args: tuple[Any, ...]) -> None:
        """A block may turn its batch-first states round for an attention that wants tokens first."""
        came = self._shapes.get(block.number)
        if (
            block.number in self._tokens_first
            and came is not None
            and args
            and isinstance(args[0], Tensor)
            and args[0].shape != came
        ):
            self._tokens_first.clear()
            self._entries.pop(
                self._blocks[0].number, None
            )  # measured before this could be known; right from the next on

    def _valid(self, block: Block, x_BTD: Tensor) -> Tensor | None:
        return self._padding.valid(block.stack, x_BTD.shape[0], x_BTD.shape[1])


def _first_hidden_state(value: Any) -> Tensor | None:
    """The first tensor with axes (batch, tokens, width) in a block's arguments or output, however they are nested."""
    if isinstance(value, Tensor):
        # A tensor that is spread over processes is not read: its similarity is not that of the part that is here.
        return value if value.ndim == 3 and value.is_floating_point() and not hasattr(value, "to_local") else None
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return None
    return next((x for x in map(_first_hidden_state, value) if x is not None), None)


ENERGY = "energy"
"""Of the hidden states, over tokens and width: the root of its mean is `hidden_rms`."""


def _sums(stats: TokenStatistics, width: int) -> dict[str, Tensor]:
    """Sums over samples of each sample's ratio; a sample that is not finite, or all padding, does not count."""
    counts_B = stats.scale.isfinite() & (stats.count > 0)
    count_B = torch.where(counts_B, stats.count, 0.0)
    # The mean token of the whole batch, in units of the batch's largest entry so that no square overflows.
    scale = torch.where(counts_B, stats.scale, 0.0).amax()
    unit_B = torch.where(counts_B, stats.scale / torch.where(scale > 0, scale, 1.0), 0.0)
    mean_BD = torch.where(counts_B[:, None], stats.mean_token, 0.0) * unit_B[:, None]
    own_B = torch.where(counts_B, stats.own, 0.0) * unit_B.square()
    energy = (torch.where(counts_B, stats.shared, 0.0) * unit_B.square() + own_B).sum()
    common_D = (mean_BD * count_B[:, None]).sum(dim=0) / count_B.sum()
    centred_B = count_B * (mean_BD - common_D).square().sum(dim=-1)
    # One sample is its own mean: nothing is left of it to be shared.
    centred_B = torch.where(counts_B & (counts_B.sum() > 1), centred_B / (centred_B + own_B), torch.nan)
    return {
        **counted("token_similarity", stats.similarity),
        **counted("token_diversity", stats.diversity),
        **counted("centred_token_similarity", centred_B),
        **counted("cosine_similarity", stats.cosine),
        **counted("nonfinite", 1 - stats.scale.isfinite().to(stats.scale.dtype)),
        ENERGY: scale.double().square() * energy,  # the square of 1e20 is no float32
        ENERGY + COUNT: count_B.sum().double() * width,
    }


def _metrics(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `_sums`, those of all ranks together, come to."""
    found = {name: mean(sums, name) for name in ActivationProbe.METRICS if name in sums}
    if ENERGY in sums:
        found["hidden_rms"] = mean(sums, ENERGY).sqrt().float()
    return found
