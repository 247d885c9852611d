"""Listen to hidden states: what goes into the first block and what comes out of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsemon.measures import TokenStatistics, token_statistics
from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks

MASK_NAMES = ("attention_mask", "src_key_padding_mask", "padding_mask")
"""Arguments of a model's forward that may say which tokens are padding. Only two-axis ones (batch, tokens) do."""


class ActivationProbe:
    """Token statistics of one sampled step, entry 0 being the first block's input."""

    METRICS = (
        "token_similarity",
        "token_diversity",
        "centred_token_similarity",
        "cosine_similarity",
        "hidden_rms",
        "nonfinite",
    )
    DEESCALATED = "deescalated_token_similarity"

    def __init__(self, model: torch.nn.Module, blocks: list[Block]) -> None:
        self._model = model
        self._blocks = blocks
        self._entries: dict[int, dict[str, Tensor]] = {}
        self._deescalated: dict[int, Tensor] = {}
        self._valid_BT: Tensor | None = None

    def arm(self, hooks: Hooks) -> None:
        self._entries, self._deescalated, self._valid_BT = {}, {}, None
        hooks.before(self._model, self._read_mask)
        hooks.before(self._blocks[0].module, lambda _, args, kwargs: self._take(0, (args, kwargs)))
        for entry, block in enumerate(self._blocks, start=1):
            if block.deescalation is None:
                hooks.after(block.module, lambda _, args, kwargs, output, entry=entry: self._take(entry, output))
            else:
                # What the block computed stands before the operator: after it with tau = 1 the similarity is always 0.
                hooks.before(block.deescalation, lambda _, args, kwargs, entry=entry: self._take(entry, (args, kwargs)))
                hooks.after(
                    block.deescalation,
                    lambda _, args, kwargs, output, entry=entry: self._take_deescalated(entry, output),
                )

    def collect(self) -> dict[str, Tensor]:
        """Metric name to one value per entry; NaN where a hook did not fire, nothing at all where none did."""
        if not self._entries:
            return {}
        absent = torch.full((), torch.nan, device=next(iter(self._entries.values()))["hidden_rms"].device)
        found = {
            metric: torch.stack([self._entries.get(i, {}).get(metric, absent) for i in range(len(self._blocks) + 1)])
            for metric in self.METRICS
        }
        if self._deescalated:
            found[self.DEESCALATED] = torch.stack(
                [self._deescalated.get(i, absent) for i in range(1, len(self._blocks) + 1)]
            )
        return found

    @property
    def num_entries(self) -> int:
        """How many hidden states were seen in this step; depth + 1 when all is well."""
        return len(self._entries)

    def _read_mask(self, _: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for name in MASK_NAMES:
            mask = kwargs.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2 and self._valid_BT is None:
                # PyTorch's masks are true at padding; Hugging Face's are 1 at tokens.
                self._valid_BT = ~mask.bool() if "padding" in name else mask.bool()

    def _take(self, entry: int, value: Any) -> None:
        # Only the first forward pass of a step counts: the rest are further micro-batches, or a recomputation.
        if entry not in self._entries and (x_BTD := self._hidden_state(entry, value)) is not None:
            self._entries[entry] = _averages(token_statistics(x_BTD, self._valid(x_BTD)), width=x_BTD.shape[-1])

    def _take_deescalated(self, entry: int, value: Any) -> None:
        if entry not in self._deescalated and (x_BTD := self._hidden_state(entry, value)) is not None:
            self._deescalated[entry] = token_statistics(x_BTD, self._valid(x_BTD)).similarity.nanmean()

    def _hidden_state(self, entry: int, value: Any) -> Tensor | None:
        x = _first_hidden_state(value)
        if x is None:
            return None
        x = x.detach()
        return x.transpose(0, 1) if self._blocks[max(entry, 1) - 1].tokens_first else x

    def _valid(self, x_BTD: Tensor) -> Tensor | None:
        fits = self._valid_BT is not None and self._valid_BT.shape == x_BTD.shape[:2]
        return self._valid_BT if fits else None


def _first_hidden_state(value: Any) -> Tensor | None:
    """The first tensor with axes (batch, tokens, width) in a block's arguments or output, however they are nested."""
    if isinstance(value, Tensor):
        return value if value.ndim == 3 and value.is_floating_point() else None
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return None
    return next((x for x in map(_first_hidden_state, value) if x is not None), None)


def _averages(stats: TokenStatistics, width: int) -> dict[str, Tensor]:
    """Mean over samples of each sample's ratio; a sample whose ratio is undefined does not count."""
    energy_B = stats.shared + stats.own
    # The mean token of the whole batch, in units of its largest entry so that no square overflows.
    scale = stats.scale.amax()
    unit_B = stats.scale / torch.where(scale > 0, scale, 1.0)
    mean_BD = stats.mean_token * unit_B[:, None]
    common_D = (mean_BD * stats.count[:, None]).sum(dim=0) / stats.count.sum()
    centred_B = stats.count * (mean_BD - common_D).square().sum(dim=-1)
    own_B = stats.own * unit_B.square()
    return {
        "token_similarity": stats.similarity.nanmean(),
        "token_diversity": stats.diversity.nanmean(),
        "centred_token_similarity": (centred_B / (centred_B + own_B)).nanmean(),
        "cosine_similarity": stats.cosine.nanmean(),
        "hidden_rms": scale * ((energy_B * unit_B.square()).sum() / (stats.count.sum() * width)).sqrt(),
        "nonfinite": 1 - stats.scale.isfinite().float().mean(),
    }
