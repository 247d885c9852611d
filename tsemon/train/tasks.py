"""How a batch becomes a loss, for each kind of model. The loop knows none of them.

Axes: `B` batch, `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all targets, (B,) or (B, T), in nats; logits have one axis more."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Task:
    """Inputs in, logits out: images and their classes, tokens and those that follow."""

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """What the model makes of one batch."""
        logits: Tensor = model(inputs)
        return logits

    def fresh(self) -> Task:
        """The same task before its first batch, for an evaluation between two steps."""
        return type(self)()

    def state_dict(self) -> dict[str, Any]:
        """What it carries from batch to batch."""
        return {}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        pass


class RecurrentTask(Task):
    """A model that returns a memory beside its logits gets it back with the next batch (Transformer-XL).

    The batches have to be streams: row b of a batch goes on where row b of the one before ended.
    """

    def __init__(self) -> None:
        self._memory: Any = None

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        logits: Tensor
        logits, memory = model(inputs, self._memory)
        self._memory = _map(Tensor.detach, memory)
        return logits

    def state_dict(self) -> dict[str, Any]:
        return {"memory": _map(Tensor.cpu, self._memory)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self._memory = _map(lambda part: part.to(device), state["memory"])


def task_of(model: nn.Module) -> Task:
    """The task that fits a model of `tsemon.models`."""
    return RecurrentTask() if type(model).__name__ == "TransformerXL" else Task()


def _map(function: Any, memory: Any) -> Any:
    """`function` of each tensor in a list, a tuple or a tensor; of nothing, nothing."""
    if isinstance(memory, (list, tuple)):
        return type(memory)(_map(function, part) for part in memory)
    return None if memory is None else function(memory)
