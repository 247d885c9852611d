"""How a batch becomes a loss, for each kind of model. The loop knows none of them.

Axes: `B` batch, `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.models import TransformerXL


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all targets, (B,) or (B, T), in nats, taken in float32 or wider; logits have one axis more."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Task:
    """Inputs in, logits out: images and their classes, tokens and those that follow."""

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over the batch, in nats."""
        return cross_entropy(model(inputs), targets)

    def loss_and_accuracy(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Both means over the batch; the share of right answers is NaN where a model does not say them."""
        logits: Tensor = model(inputs)
        is_right = logits.argmax(-1) == targets
        return cross_entropy(logits, targets), is_right.double().mean()

    def fresh(self) -> Task:
        """The same task before its first batch, for an evaluation between two steps."""
        return type(self)()

    def state_dict(self) -> dict[str, Any]:
        """What it carries from batch to batch."""
        return {}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        pass


class RecurrentTask(Task):
    """A model that returns its loss and a memory, which it gets back with the next batch (Transformer-XL).

    The batches have to be streams: row b of a batch goes on where row b of the one before ended.
    """

    def __init__(self) -> None:
        self._memory: Sequence[Tensor] | None = None

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor
        loss, self._memory = model(inputs, self._memory, targets)
        return loss

    def loss_and_accuracy(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.loss(model, inputs, targets)
        return loss, loss.new_tensor(torch.nan)

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self._memory and [part.cpu() for part in self._memory]}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self._memory = state["memory"] and [part.to(device) for part in state["memory"]]


def task_of(model: nn.Module) -> Task:
    """The task that fits a model of `tsemon.models`."""
    return RecurrentTask() if isinstance(model, TransformerXL) else Task()
