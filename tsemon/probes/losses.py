"""The losses of all steps since the last sample, and of the last steps, as `monitor.step` was given them.

Axes: N losses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from tsemon.catalogue import NOISE_ENDS_BEFORE, NUM_OF_NOISE
from tsemon.measures.losses import loss_metrics, loss_sums, recent_metrics, recent_sums
from tsemon.measures.sums import Partials
from tsemon.probes.part import Part
from tsemon.probes.reading import Reading
from tsemon.probes.states import version_of

MAX_STEPS = 4096
"""Losses that are kept at the most; of more the last ones count."""
NUM_PER_STACK = 128
"""So many go into one tensor as soon as they are there, so that no step has a thousand of them to stack."""
MAX_STORAGE_BYTES = 4096
"""A loss that is part of a larger tensor is copied, so that it does not keep that one."""


class LossProbe(Part):
    """Mean, extremes and spread of the loss over steps, and how many of them were not finite.

    A tensor is kept as it is, detached: nothing is copied, nothing waits for the device. One that is written into before
    it is read is not what was given any more: it is left out, and losses are copied from then on. They are, too, once one
    has the memory of the one before, as the static output of a CUDA graph and a running sum have.
    """

    METRICS = (
        *("loss_mean", "loss_min", "loss_max", "loss_std", "loss_nonfinite"),
        *("loss_recent", "loss_before", "loss_noise"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._pending: list[tuple[Tensor | float, int | None]] = []
        """Losses, and the versions that the tensors among them had when they were given."""
        self._stacks: deque[Tensor] = deque(maxlen=MAX_STEPS // NUM_PER_STACK)
        self._remembered: Tensor | None = None
        """The losses of the last 40 steps at the last sample."""
        self._newest: tuple[int, Tensor] | None = None
        """The last tensor and its address, which no other loss can have while this one lives."""
        self._must_copy = False
        self._is_given = False

    def add(self, loss: object) -> None:
        """Take the loss of one step. What is not one number is complained of elsewhere."""
        if not isinstance(loss, Tensor):
            try:
                self._pending.append((float(loss), None))  # type: ignore[arg-type]
            except (TypeError, ValueError):
                return
        elif type(loss) is Tensor and loss.numel() == 1 and not loss.is_complex():
            own = loss.detach()
            address = own.data_ptr()
            self._must_copy |= self._newest is not None and self._newest[0] == address
            self._newest = address, own
            if self._must_copy or own.untyped_storage().nbytes() > MAX_STORAGE_BYTES:
                own = own.clone()
            self._pending.append((own, version_of(own)))

    @property
    def newest(self) -> Tensor | None:
        """The last loss before the newest sample, on its device."""
        return None if self._remembered is None else self._remembered[-1]

    @property
    def is_full(self) -> bool:
        """Whether it is time to `stack`."""
        return len(self._pending) >= NUM_PER_STACK

    def stack(self) -> None:
        """Put what is pending into one tensor, without what has changed since."""
        pending, self._pending = self._pending, []
        losses = [loss for loss, version in pending if not isinstance(loss, Tensor) or version_of(loss) == version]
        self._must_copy |= len(losses) < len(pending)
        if not losses:
            return
        tensors = [loss for loss in losses if isinstance(loss, Tensor)]
        if not tensors:
            self._stacks.append(torch.tensor(losses, dtype=torch.float64))
            return
        # A float must not become an integer beside one.
        wide = partial(torch.full, (), dtype=torch.float64, device=tensors[0].device)
        tensors = [loss if isinstance(loss, Tensor) else wide(fill_value=loss) for loss in losses]
        self._stacks.append(torch.stack(_on_one_device([loss.reshape(()) if loss.ndim else loss for loss in tensors])))

    def collect(self) -> Partials:
        if self._pending:
            self.stack()
        stacks = list(self._stacks)
        self._stacks.clear()
        if not stacks:
            return {}
        remembered = [] if self._remembered is None else [self._remembered]
        *remembered, losses = _on_one_device([*remembered, torch.cat(_on_one_device(stacks))])
        self._remembered = torch.cat([*remembered, losses])[-NUM_OF_NOISE - NOISE_ENDS_BEFORE :]
        return loss_sums(losses) | recent_sums(self._remembered)

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        self._is_given = "count" in sums
        if not self._is_given:
            return Reading()
        found = loss_metrics(sums) | recent_metrics(sums)
        # A run on a GPU may give its losses as floats: what is on the host already need not go there and back.
        is_here = sums["count"].device.type == "cpu"
        return Reading(scalars={name: value.item() if is_here else value for name, value in found.items()})

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        return {} if self._is_given else dict.fromkeys(self.METRICS, "monitor.step() was given no loss")


def _on_one_device(tensors: list[Tensor]) -> list[Tensor]:
    """A loop may give some losses on the host and others on a GPU. No copy to the host: it would wait for the device."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return [tensor.to(device) for tensor in tensors]
