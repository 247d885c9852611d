"""The loss of a step, read from the outputs of the model, for a training loop that gives it to no callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tsemon.probes.hooks import Hooks

NO_LOSS = "no output of the model had a loss"


class OutputLoss:
    """Keeps the `loss` in the outputs of a model until `take`. Only passes that record gradients in training mode count.

    The loss is the one under "loss" in a mapping, or else a scalar that is the first of a tuple. It stays on its device,
    and nothing waits for it.
    """

    def __init__(self, hooks: Hooks, model: nn.Module) -> None:
        self._hooks = hooks
        self._losses: list[Tensor] = []
        self._loss: Tensor | None = None
        self._is_sum = False
        """Whether the model divided by the number of items in the whole step, so that the losses of batches add up."""
        self._is_optimized = False
        """Whether a backward pass has come through a loss."""
        self._is_closed = False
        self._sum: Tensor | None = None
        """Sum of the losses since `mean` was last called."""
        self._num = 0
        self.why_not = ""
        """Why the last `take` returned None. Empty once closed."""
        hooks.after(model, self._see)

    def take(self, num_batches: int, scale: float = 1.0) -> Tensor | None:
        """Return the loss of the step that ends, None if it is not known.

        num_batches: Number of batches whose gradients were accumulated. scale: Factor of a loss that is a sum.
        """
        losses, self._losses, self._loss = self._losses, [], None
        self.why_not = "" if self._is_closed else self._why_not(len(losses), num_batches)
        if losses and not self.why_not:
            self._hooks.guard.contain(self._merge, losses, scale)
        return self._loss

    def mean(self) -> float | None:
        """Return the mean of the losses since it was last called, if there are any. Waits for the device."""
        total, num, self._sum, self._num = self._sum, self._num, None, 0
        return None if total is None else total.item() / num

    def close(self) -> None:
        """Take the hook out."""
        self._is_closed = True
        self._losses = []
        self._hooks.remove()

    def _why_not(self, num_losses: int, num_batches: int) -> str:
        if not num_losses:
            return NO_LOSS
        if num_losses != num_batches:
            return f"the model returned {num_losses} losses for the {num_batches} batches of a step"
        return "" if self._is_optimized else "the training does not use the loss in the output of the model"

    def _see(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        loss = _loss_in(output)
        if loss is None or not (model.training and self._hooks.guard.is_grad_enabled and loss.requires_grad):
            return
        if not self._is_optimized:
            loss.register_hook(self._pass_back)  # type: ignore[no-untyped-call]
        # A copy, because the loop may write into the loss.
        wide = torch.promote_types(loss.dtype, torch.float32)
        self._losses.append(loss.detach().reshape(()).to(wide, copy=True))
        self._is_sum = kwargs.get("num_items_in_batch") is not None

    def _pass_back(self, gradient: Tensor) -> None:
        self._is_optimized = True

    def _merge(self, losses: list[Tensor], scale: float) -> None:
        total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        factor = scale if self._is_sum else 1 / len(losses)
        self._loss = total if factor == 1 else total * factor
        self._sum = self._loss if self._sum is None else self._sum + self._loss
        self._num += 1


def _loss_in(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        loss = output.get("loss")
    else:  # whose first item may be logits
        first = output[0] if isinstance(output, tuple | list) and output else None
        loss = first if isinstance(first, Tensor) and first.ndim == 0 else None
    return loss if type(loss) is Tensor and loss.numel() == 1 and loss.is_floating_point() else None
