"""Listen to hidden states: what goes into the first block and what comes out of each.

Axes: B samples, T tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tsemon.measures import TokenStatistics, token_statistics
from tsemon.probes.discovery import Block, may_take_fast_path
from tsemon.probes.hooks import Hooks
from tsemon.probes.padding import Padding


class ActivationProbe:
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

    def __init__(self, blocks: list[Block], padding: Padding) -> None:
        self._blocks = blocks
        self._padding = padding
        self._tokens_first = [block.tokens_first for block in blocks]
        self._shapes: dict[int, torch.Size] = {}
        self._entries: dict[int, dict[str, Tensor]] = {}
        self._deescalated: dict[int, Tensor] = {}

    def forget(self) -> None:
        self._shapes, self._entries, self._deescalated = {}, {}, {}

    def listen(self, hooks: Hooks) -> None:
        """Hook the blocks for the pass that begins."""
        self.forget()
        for number, block in enumerate(self._blocks):
            if isinstance(block.module, nn.TransformerEncoderLayer) and may_take_fast_path(block.module):
                continue  # a hook on it, or in it, would send it another way
            if number == 0:
                hooks.before(block.module, lambda _, args, kwargs: self._take(0, (args, kwargs)))
            if isinstance(block.attention, nn.MultiheadAttention) and not block.attention.batch_first:
                hooks.before(block.attention, lambda _, args, kwargs, number=number: self._check_axes(number, args))
            entry = number + 1
            if block.deescalation is None:
                hooks.after(block.module, lambda _, args, kwargs, output, entry=entry: self._take(entry, output))
            else:
                # What the block computed stands before the operator: after it with tau = 1 the similarity is always 0.
                hooks.before(block.deescalation, lambda _, args, kwargs, entry=entry: self._take(entry, (args, kwargs)))
                hooks.after(
                    block.deescalation,
                    lambda _, args, kwargs, output, entry=entry: self._take_deescalated(entry, output),
                )

    def take_input(self, args: Any, kwargs: Any) -> None:
        """Take the first block's input where no hook could: from its arguments."""
        self._take(0, (args, kwargs))

    def collect(self) -> dict[str, Tensor]:
        """Metric name to one value per entry; NaN where a hook did not fire, nothing at all where none did."""
        if not self._entries:
            return {}
        device = next(iter(self._entries.values()))["hidden_rms"].device
        absent = torch.full((), torch.nan, device=device)

        def stack(values: list[Tensor | None]) -> Tensor:
            return torch.stack([absent if v is None else v.to(device, non_blocking=True) for v in values])

        num_entries = len(self._blocks) + 1
        found = {
            metric: stack([self._entries.get(entry, {}).get(metric) for entry in range(num_entries)])
            for metric in self.METRICS
            if metric != self.DEESCALATED
        }
        if self._deescalated:
            found[self.DEESCALATED] = stack([self._deescalated.get(entry) for entry in range(1, num_entries)])
        return found

    @property
    def num_entries(self) -> int:
        """How many hidden states were seen; depth + 1 when all is well."""
        return len(self._entries)

    def _take(self, entry: int, value: Any) -> None:
        # A block that runs again in the same pass is recomputed, or shared by several layers.
        if entry not in self._entries and (x_BTD := self._hidden_state(entry, value)) is not None:
            self._entries[entry] = _averages(token_statistics(x_BTD, self._valid(entry, x_BTD)), width=x_BTD.shape[-1])

    def _take_deescalated(self, entry: int, value: Any) -> None:
        if entry not in self._deescalated and (x_BTD := self._hidden_state(entry, value)) is not None:
            self._deescalated[entry] = token_statistics(x_BTD, self._valid(entry, x_BTD)).similarity.nanmean()

    def _hidden_state(self, entry: int, value: Any) -> Tensor | None:
        x = _first_hidden_state(value)
        if x is None:
            return None
        self._shapes[entry] = x.shape
        x = x.detach()
        return x.transpose(0, 1) if self._tokens_first[max(entry, 1) - 1] else x

    def _check_axes(self, number: int, args: tuple[Any, ...]) -> None:
        """A block may turn its batch-first states round for an attention that wants tokens first."""
        came = self._shapes.get(number)
        if (
            self._tokens_first[number]
            and came is not None
            and args
            and isinstance(args[0], Tensor)
            and args[0].shape != came
        ):
            self._tokens_first = [False] * len(self._blocks)
            self._entries.pop(0, None)  # measured before this could be known; from the next sample on it is right

    def _valid(self, entry: int, x_BTD: Tensor) -> Tensor | None:
        return self._padding.valid(self._blocks[max(entry, 1) - 1].stack, x_BTD.shape[0], x_BTD.shape[1])


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


def _averages(stats: TokenStatistics, width: int) -> dict[str, Tensor]:
    """Mean over samples of each sample's ratio; a sample that is not finite, or all padding, does not count."""
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
        "token_similarity": stats.similarity.nanmean(),
        "token_diversity": stats.diversity.nanmean(),
        "centred_token_similarity": centred_B.nanmean(),
        "cosine_similarity": stats.cosine.nanmean(),
        "hidden_rms": scale * (energy / (count_B.sum() * width)).sqrt(),
        "nonfinite": 1 - stats.scale.isfinite().to(stats.scale.dtype).mean(),
    }
