"""How a batch becomes a loss, for each kind of model. The loop knows none of them.

Axes: `B` batch, `T` tokens, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tsemon.lab.train.batches import generator
from tsemon.models import T5Encoder, TextEncoder, TransformerXL

if TYPE_CHECKING:
    from tsemon.lab.train.datasets import DataSet

IGNORED = -100
"""Target of a token that is not predicted."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all targets, (B,) or (B, T), in nats, taken in float32 or wider; logits have one axis more."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


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

    def meaning(self, data: DataSet, loss: float, accuracy: float) -> dict[str, float]:
        """More numbers of a validation, from its mean loss in nats."""
        return data.meaning(loss, accuracy)

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


class MaskedTask(Task):
    """A model that sees the whole sequence and fills in hidden tokens (BERT, arXiv 1810.04805, Section 3.1).

    15 % of the tokens are predicted: 80 % of these become the mask, the last entry of the vocabulary, 10 % a token drawn at
    random, and 10 % stay. The targets of a batch are not used.
    """

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self._mask = vocab - 1
        self._generator = generator(seed)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden, targets = self._hide(inputs)
        return cross_entropy(model(hidden), targets)

    def loss_and_accuracy(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        hidden, targets = self._hide(inputs)
        logits: Tensor = model(hidden)
        is_right = (logits.argmax(-1) == targets).sum() / (targets != IGNORED).sum()
        return cross_entropy(logits, targets), is_right.double()

    def _hide(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the model and its targets, (B, T) both."""
        drawn_BT, kind_BT = torch.rand((2, *tokens_BT.shape), generator=self._generator).to(tokens_BT.device)
        others_BT = torch.randint(self._mask, tokens_BT.shape, generator=self._generator).to(tokens_BT.device)
        # The smallest number of each batch is among them, so that a batch without targets has no loss of NaN.
        is_target_BT = drawn_BT <= drawn_BT.min().clamp(min=0.15)
        seen_BT = torch.where(kind_BT < 0.8, self._mask, torch.where(kind_BT < 0.9, others_BT, tokens_BT))
        return torch.where(is_target_BT, seen_BT, tokens_BT), torch.where(is_target_BT, tokens_BT, IGNORED)

    def meaning(self, data: DataSet, loss: float, accuracy: float) -> dict[str, float]:
        return {"accuracy": accuracy}

    def fresh(self) -> Task:
        return MaskedTask(self._mask + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self._generator.set_state(state["generator"])


FILL_IN_MASKS = (TextEncoder, T5Encoder)
"""Models whose vocabulary has one entry more than the data's: the mask."""


def task_of(model: nn.Module, seed: int = 0) -> Task:
    """The task that fits a model of `tsemon.models`; `seed` draws the masks."""
    if isinstance(model, FILL_IN_MASKS):
        return MaskedTask(model.config.vocab, seed)
    return RecurrentTask() if isinstance(model, TransformerXL) else Task()
