"""The plainest training loop, as a generator: whoever drives it decides what happens between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Iterator[Tensor]:
    """One optimizer step per batch; yields its loss, a detached scalar tensor, from before the step.

    Whoever receives it still finds the step's gradients and learning rate in place.
    """
    model.train()
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.detach()
        if schedule is not None:
            schedule.step()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all targets, (B,) or (B, T), in nats; logits have one axis more."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
