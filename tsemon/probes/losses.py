"""The losses of all steps since the last sample, and of the last steps, as `monitor.step` was given them.

Axes: N losses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.catalogue import NOISE_ENDS_BEFORE, NUM_OF_NOISE, NUM_SEARCHED
from tsemon.measures.losses import loss_metrics, loss_sums, recent_metrics, recent_sums, start_metrics, start_sums
from tsemon.measures.sums import Partials
from tsemon.probes.every_step import EveryStep, on_one_device
from tsemon.probes.part import Part
from tsemon.probes.reading import Reading


class LossProbe(Part):
    """Mean, extremes and spread of the loss over steps, and how many of them were not finite."""

    METRICS = (
        *("loss_mean", "loss_min", "loss_max", "loss_std", "loss_nonfinite"),
        *("loss_recent", "loss_before", "loss_noise", "loss_start"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.given = EveryStep("loss", num_first=NUM_SEARCHED)
        self._remembered: Tensor | None = None
        """The losses of the last 40 steps at the last sample."""
        self._start: Partials | None = None
        """Sums over the first losses, once all of them are known."""
        self._is_given = False

    @property
    def newest(self) -> Tensor | None:
        """The last loss given before the newest sample, on its device. None if it was left out."""
        return None if self._remembered is None or not self.given.has_newest else self._remembered[-1]

    def collect(self) -> Partials:
        losses = self.given.take()
        if losses is None:
            return {}
        remembered = [] if self._remembered is None else [self._remembered]
        *remembered, losses = on_one_device([*remembered, losses])
        self._remembered = torch.cat([*remembered, losses])[-NUM_OF_NOISE - NOISE_ENDS_BEFORE :]
        start = start_sums(self.given.first()) if self._start is None else self._start
        if self.given.has_first:
            self._start = start
        return loss_sums(losses) | recent_sums(self._remembered) | start

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        self._is_given = "count" in sums
        if not self._is_given:
            return Reading()
        found = loss_metrics(sums) | recent_metrics(sums) | start_metrics(sums)
        # A run on a GPU may give its losses as floats: what is on the host already need not go there and back.
        is_here = sums["count"].device.type == "cpu"
        return Reading(scalars={name: value.item() if is_here else value for name, value in found.items()})

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        return (
            {} if self._is_given else dict.fromkeys(self.METRICS, "monitor.step() was given no loss that is one number")
        )
