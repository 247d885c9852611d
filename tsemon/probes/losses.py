"""The losses of all steps since the last sample, and of the last steps, as `monitor.step` was given them.

Axes: N losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tsemon.catalogue import NOISE_ENDS_BEFORE, NUM_AT_START, NUM_OF_NOISE, NUM_SEARCHED
from tsemon.errors import InvalidArgument
from tsemon.measures.losses import (
    loss_metrics,
    loss_sums,
    recent_metrics,
    recent_sums,
    start_metrics,
    start_sums,
    without_stand_ins,
)
from tsemon.measures.sums import Partials
from tsemon.probes.every_step import EveryStep, on_one_device
from tsemon.probes.part import Part
from tsemon.probes.reading import Reading


class PastLosses(NamedTuple):
    """Losses before a checkpoint. NaN where the loop did not know the loss."""

    first: Sequence[float] = ()
    """They decide `loss_start`."""
    last: Sequence[float] = ()
    """The last 40."""

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> PastLosses:
        """The losses in a `state`, which need not have any. Raises InvalidArgument if they are not losses."""
        losses = state.get("losses", {})
        try:
            return PastLosses(*([0.0 + loss for loss in losses[name]] for name in PastLosses._fields if losses))
        except (TypeError, KeyError, IndexError, OverflowError):
            raise InvalidArgument(
                f"the losses in the state of a monitor are lists of numbers, first and last, got {losses!r:.100}"
            ) from None


class LossProbe(Part):
    """Mean, extremes and spread of the loss over steps, and how many of them were not finite."""

    METRICS = (
        *("loss_mean", "loss_min", "loss_max", "loss_std", "loss_nonfinite"),
        *("loss_recent", "loss_before", "loss_noise", "loss_start"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.given = EveryStep("loss", num_first=NUM_SEARCHED)
        self._first_before = self._last_before = torch.empty(0, dtype=torch.float64)
        """The first and the last losses before the checkpoint that the training resumes at."""
        self._newest: Tensor | None = None
        self._last: Tensor | None = None
        """The last 40 losses at the newest sample; NaN where the loop did not know the loss."""
        self._start: Partials | None = None
        """Sums over the first losses, once all of them are known."""
        self._is_given = False

    @property
    def newest(self) -> Tensor | None:
        """The last loss given before the newest sample, on its device. None if it was left out."""
        return self._newest if self.given.has_newest else None

    def collect(self) -> Partials:
        losses = self.given.take()
        if losses is None:
            return {}
        self._newest, self._last = losses[-1], self._last_with(losses)
        start = self._start or start_sums(self._first())
        if self.given.has_first:
            self._start = start
        return loss_sums(losses) | recent_sums(self._last) | start

    def _first(self) -> Tensor:
        return _joined(self._first_before, without_stand_ins(self.given.first()))

    def _last_with(self, losses: Tensor) -> Tensor:
        """The last 40 losses, those since the newest sample among them."""
        if not self.given.has_first:
            last = _joined(self._last_before, without_stand_ins(self.given.first()))
        else:
            last = losses if self._last is None else _joined(self._last, losses)
        return last[-NUM_OF_NOISE - NOISE_ENDS_BEFORE :]

    def past(self) -> PastLosses:
        """Return the first and the last losses so far. Waits for the device."""
        losses = self.given.kept()
        last = self._last if losses is None else self._last_with(losses)
        if last is None:
            return PastLosses(self._first_before.tolist(), self._last_before.tolist())
        first = self._first()
        return PastLosses(first[first.isfinite()][:NUM_AT_START].tolist(), last.tolist())

    def continue_from(self, past: PastLosses) -> None:
        """Count these, too."""
        self._first_before, self._last_before = (torch.tensor(losses, dtype=torch.float64) for losses in past)

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


def _joined(first: Tensor, then: Tensor) -> Tensor:
    return torch.cat(on_one_device([first, then]))
