"""The gradient norms of all steps since the last sample, and of the last steps.

Axes: N norms.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tsemon.catalogue import NUM_RECENT
from tsemon.measures.grad_norms import grad_norm_metrics, grad_norm_sums
from tsemon.measures.sums import Partials
from tsemon.probes.every_step import EveryStep, on_one_device
from tsemon.probes.part import Part
from tsemon.probes.reading import Reading

NOT_GIVEN = (
    "no step had a gradient norm: clip it as a whole with torch.nn.utils.clip_grad_norm_, or pass "
    "monitor.step(grad_norm=...)"
)


class GradNormProbe(Part):
    """Mean and maximum of the norm of the gradient over steps, and how many norms were not finite."""

    METRICS = ("grad_norm_mean", "grad_norm_max", "grad_norm_nonfinite", "grad_norm_recent")

    def __init__(self) -> None:
        super().__init__()
        self.given = EveryStep("grad_norm")
        self._remembered: Tensor | None = None
        """The norms of the last steps at the last sample."""
        self._is_given = False

    def collect(self) -> Partials:
        norms = self.given.take()
        if norms is None:
            return {}
        remembered = [] if self._remembered is None else [self._remembered]
        *remembered, norms = on_one_device([*remembered, norms])
        self._remembered = torch.cat([*remembered, norms])[-NUM_RECENT:]
        return grad_norm_sums(norms, self._remembered)

    def finish(self, sums: Mapping[str, Tensor]) -> Reading:
        self._is_given = "count" in sums
        if not self._is_given:
            return Reading()
        found = grad_norm_metrics(sums)
        is_here = sums["count"].device.type == "cpu"
        return Reading(scalars={name: value.item() if is_here else value for name, value in found.items()})

    def why_missing(self, why_unseen: str) -> dict[str, str]:
        return {} if self._is_given else dict.fromkeys(self.METRICS, NOT_GIVEN)
