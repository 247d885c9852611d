"""All probes of one model: armed for a sampled step, disarmed after it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tsemon.probes.activations import ActivationProbe
from tsemon.probes.attention import AttentionProbe
from tsemon.probes.discovery import Block
from tsemon.probes.hooks import Hooks
from tsemon.probes.parameters import ParameterProbe

UPDATES = {"update_norm", "update_ratio", "update_alignment", "step_size"}
GRADIENTS = {"grad_norm", "total_grad_norm", "learning_rate"}


@dataclass(frozen=True, slots=True)
class Reading:
    """What one sampled step gave, still on the device."""

    layers: dict[str, Tensor]
    heads: dict[str, Tensor]
    scalars: dict[str, Tensor | float]


class Probe:
    """Measures one model at one step. Faults are reported to `on_fault` and never raised."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        blocks: list[Block],
        measures: Collection[str],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._measures = measures
        self._hooks = Hooks(model, on_fault)
        self._num_blocks = len(blocks)
        self._activations = ActivationProbe(model, blocks)
        self._attention = AttentionProbe(blocks)
        self._parameters = ParameterProbe(model, blocks, optimizer)
        self._no_attention = [block.name for block in blocks if block.attention is None]
        self.not_measured: dict[str, str] = {}
        """Metric to the reason why the last sampled step lacks it, in whole or in part."""

    @property
    def cost_s(self) -> float:
        """Seconds spent in hooks so far, on the thread that trains."""
        return self._hooks.cost_s

    def arm(self) -> None:
        """Hook the model for the next step."""
        for probe in (self._activations, self._attention, self._parameters):
            if self._wants(probe):
                probe.arm(self._hooks)

    def disarm(self) -> None:
        """Take every hook out again."""
        self._hooks.remove()

    def collect(self) -> Reading:
        """What the armed step gave. The tensors are on the model's device and nothing has waited for them."""
        reading = Reading({}, {}, {})
        self.not_measured = {}
        if self._wants(self._activations):
            self._hooks.guard(self._collect_activations, reading)
        if self._wants(self._attention):
            self._hooks.guard(self._collect_attention, reading)
        if self._wants(self._parameters):
            self._hooks.guard(self._collect_parameters, reading)
        for part in (reading.layers, reading.heads, reading.scalars):
            for name in part.keys() - self._measures:
                del part[name]
        self.not_measured = {name: why for name, why in self.not_measured.items() if name in self._measures}
        return reading

    def _wants(self, probe: ActivationProbe | AttentionProbe | ParameterProbe) -> bool:
        names: set[str] = set()
        if isinstance(probe, ActivationProbe):
            names = {*probe.METRICS, probe.DEESCALATED}
        elif isinstance(probe, AttentionProbe):
            names = set(probe.METRICS)
        else:
            names = UPDATES | GRADIENTS | {"param_norm", "total_param_norm"}
        return not names.isdisjoint(self._measures)

    def _collect_activations(self, reading: Reading) -> None:
        reading.layers.update(self._activations.collect())
        if (seen := self._activations.num_entries) < self._num_blocks + 1:
            self._miss(
                ActivationProbe.METRICS,
                f"{self._num_blocks + 1 - seen} of {self._num_blocks + 1} hidden states were not seen: the hooks of those "
                "blocks did not fire (is the model compiled, or are the blocks called in another way?) or passed no "
                "tensor of shape (batch, tokens, width)",
            )

    def _collect_attention(self, reading: Reading) -> None:
        layers, heads = self._attention.collect()
        reading.layers.update(layers)
        reading.heads.update(heads)
        if self._no_attention:
            self._miss(AttentionProbe.METRICS, f"found no self-attention in {', '.join(self._no_attention)}")
        elif (seen := self._attention.num_layers) < self._num_blocks:
            self._miss(
                AttentionProbe.METRICS,
                f"attention was not seen in {self._num_blocks - seen} of {self._num_blocks} blocks: they computed it "
                "without scaled_dot_product_attention or softmax, or their hooks did not fire (is the model compiled?)",
            )

    def _collect_parameters(self, reading: Reading) -> None:
        layers, scalars = self._parameters.collect()
        reading.layers.update(layers)
        reading.scalars.update(scalars)
        reason = self._parameters.why_no_update()
        if reason is None and "total_grad_norm" not in scalars:
            reason = "the optimizer given to attach() made no step between two calls of monitor.step()"
        if reason is not None:
            self._miss(UPDATES - layers.keys() - scalars.keys(), reason)
            self._miss(GRADIENTS - layers.keys() - scalars.keys(), reason)

    def _miss(self, names: Collection[str], reason: str) -> None:
        self.not_measured.update(dict.fromkeys(names, reason))
