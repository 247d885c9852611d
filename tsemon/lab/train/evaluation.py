"""How a model does on data that it does not learn from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import nn

from tsemon.lab.train.batches import Batch
from tsemon.lab.train.loop import autocast, on_device
from tsemon.lab.train.processes import Processes
from tsemon.lab.train.tasks import Task

ALONE = Processes()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    precision: torch.dtype = torch.float32,
    max_batches: int | None = None,
    processes: Processes = ALONE,
) -> tuple[float, float] | None:
    """Mean loss in nats and share of right answers over all targets, in eval mode; None where there are none.

    Each process takes its rows of each batch. The model is left in the mode that it was in.
    The share is NaN for models that do not say it.
    """
    task = (task or Task()).fresh()
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=processes.device)  # losses, right answers, targets
    try:
        for batch in itertools.islice(batches, max_batches):
            inputs, targets = (part[processes.rank :: processes.world] for part in batch)
            if count := targets.numel():
                with autocast(processes.device, precision):
                    means = task.loss_and_accuracy(model, *on_device((inputs, targets), processes.device))
                sums += count * torch.stack([*means, torch.ones_like(means[0])])
    finally:
        model.train(was_training)
    loss, right, count = processes.sum(sums).tolist()
    return (loss / count, right / count) if count else None
