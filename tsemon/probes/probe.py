"""All probes of one model: armed for a sampled step, disarmed after it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.probes.activations import ActivationProbe
from tsemon.probes.attention import AttentionProbe
from tsemon.probes.discovery import Block, path_to_gate, runs_compiled
from tsemon.probes.hooks import Guard, Hooks
from tsemon.probes.padding import Padding
from tsemon.probes.parameters import ParameterProbe


@dataclass(frozen=True, slots=True)
class Reading:
    """What one sampled step gave, still on the device."""

    layers: dict[str, Tensor]
    heads: dict[str, Tensor]
    scalars: dict[str, Tensor | float]


class Probe:
    """Measures one model at one step. Faults are reported to `on_fault` and never raised.

    Two sets of hooks. The outer ones, from `arm` to `disarm`, watch the optimizer and the gate: the module that holds all
    blocks. When a training pass comes through the gate, the inner ones go into the blocks, for that pass alone. So an
    evaluation between two steps meets no hook inside the blocks, and of several micro-batches only the first is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        blocks: list[Block],
        measures: Collection[str],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._blocks = blocks
        self._path = path_to_gate(model, blocks)
        self._gate = self._path[-1]
        self._is_gate_called = True
        self._measures = measures
        self._guard = Guard(on_fault)
        self._outer, self._inner = Hooks(self._guard), Hooks(self._guard)
        self._padding = Padding(num_stacks=1 + max(block.stack for block in blocks))
        self._activations = ActivationProbe(blocks, self._padding)
        self._attention = AttentionProbe(blocks, self._padding)
        self._parameters = ParameterProbe(model, blocks, optimizer)
        self._saw_train_mode: bool | None = None
        self.not_measured: dict[str, str] = {}
        """Metric to the reason why the last sampled step lacks it, in whole or in part."""

    @property
    def cost_s(self) -> float:
        """Seconds spent in hooks so far, on the thread that trains."""
        return self._guard.cost_s

    def arm(self) -> None:
        """Watch the next step."""
        self._saw_train_mode = None
        if self._wants(self._activations.METRICS) or self._wants(self._attention.METRICS):
            for module in self._path:
                self._outer.before(module, self._padding.read)
            if self._is_gate_called:
                self._outer.before(self._gate, self._open)
                self._outer.after(self._gate, self._close, always=True)
            else:
                self._outer.before(self._blocks[0].module, self._open_at_first_block)
        if self._wants(self._parameters.METRICS):
            self._parameters.arm(self._outer)

    def disarm(self) -> None:
        """Take every hook out again, and let go of what was seen."""
        try:
            self._inner.remove()
        finally:
            self._outer.remove()
        for part in (self._activations, self._attention, self._parameters, self._padding):
            part.forget()

    def collect(self) -> Reading:
        """What the armed step gave. The tensors are on the model's device and nothing has waited for them."""
        reading = Reading({}, {}, {})
        self.not_measured = {}
        self._guard.run(self._collect, reading)
        for part in (reading.layers, reading.heads, reading.scalars):
            for name in part.keys() - self._measures:
                del part[name]
        self.not_measured = {name: why for name, why in self.not_measured.items() if name in self._measures}
        return reading

    def _open(self, gate: nn.Module, *_: Any) -> None:
        # Without gradients it is an evaluation. With them, one in eval mode may be, too: the first pass in train mode
        # takes its place. (Who trains in eval mode, to be rid of dropout, makes no other.)
        is_first = self._saw_train_mode is None
        is_better = self._saw_train_mode is False and gate.training
        if not self._guard.is_grad_enabled or not (is_first or is_better) or runs_compiled(gate):
            return
        self._saw_train_mode = gate.training
        self._inner.remove()
        if self._wants(self._activations.METRICS):
            self._activations.listen(self._inner)
        if self._wants(self._attention.METRICS):
            self._attention.listen(self._inner)

    def _open_at_first_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        was = self._saw_train_mode
        self._open(block)
        if self._saw_train_mode is not was and self._wants(self._activations.METRICS):
            self._activations.take_input(args, kwargs)  # too late for a hook of its own

    def _close(self, gate: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._inner.remove()
        self._padding.forget()
        if output is None:  # the pass failed half way; it may be tried again
            self._saw_train_mode = None
            self._activations.forget()
            self._attention.forget()

    def _wants(self, names: Collection[str]) -> bool:
        return any(name in self._measures for name in names)

    def _collect(self, reading: Reading) -> None:
        # Some call the blocks without their owner's forward, from a training_step for one. Then the first block is the
        # gate from now on, unless hooks there between passes would disable its fast path, or be compiled.
        first = self._blocks[0].module
        if (
            self._saw_train_mode is None
            and not isinstance(first, nn.TransformerEncoderLayer)
            and not runs_compiled(first)
        ):
            self._is_gate_called = False
        # Each part by itself: a fault in one leaves the others.
        if self._wants(self._activations.METRICS):
            self._guard.run(self._collect_activations, reading)
        if self._wants(self._attention.METRICS):
            self._guard.run(self._collect_attention, reading)
        if self._wants(self._parameters.METRICS):
            self._guard.run(self._collect_parameters, reading)

    def _collect_activations(self, reading: Reading) -> None:
        reading.layers.update(self._activations.collect())
        all_entries = len(self._blocks) + 1
        if (missed := all_entries - self._activations.num_entries) > 0:
            self._miss(
                self._activations.METRICS,
                f"{missed} of {all_entries} hidden states were not seen: {self._why_unseen()}, or the block passed no "
                "tensor of shape (batch, tokens, width)",
            )

    def _collect_attention(self, reading: Reading) -> None:
        layers, heads = self._attention.collect()
        reading.layers.update(layers)
        reading.heads.update(heads)
        without = [block.name for block in self._blocks if block.attention is None]
        if without:
            self._miss(self._attention.METRICS, f"found no self-attention in {', '.join(without)}")
        elif (missed := len(self._blocks) - self._attention.num_layers) > 0:
            self._miss(
                self._attention.METRICS,
                f"attention was not seen in {missed} of {len(self._blocks)} blocks: {self._why_unseen()}, or the block "
                "computed it without scaled_dot_product_attention or softmax",
            )

    def _collect_parameters(self, reading: Reading) -> None:
        layers, scalars = self._parameters.collect()
        reading.layers.update(layers)
        reading.scalars.update(scalars)
        self.not_measured.update(self._parameters.why_missing())

    def _why_unseen(self) -> str:
        if self._saw_train_mode is None:
            return (
                f"no training pass came through {type(self._gate).__name__}, which holds the blocks, since the last call of "
                "monitor.step() (is the model compiled, or called by another name than forward?)"
            )
        return "hooks in the blocks did not fire (are they compiled, or frozen in eval mode?)"

    def _miss(self, names: Collection[str], reason: str) -> None:
        self.not_measured.update(dict.fromkeys(names, reason))
