"""How a model does on data that it does not learn from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import nn

from tsemon.train.batches import Batch
from tsemon.train.loop import logits_of
from tsemon.train.processes import Processes
from tsemon.train.tasks import Task, cross_entropy

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
) -> tuple[float, float]:
    """Mean loss in nats and share of right answers over all targets, in eval mode; NaN where there are none.

    Each process takes its rows of each batch. The model is left in the mode that it was in.
    """
    task = (task or Task()).fresh()
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=processes.device)  # loss, right answers, targets
    try:
        for batch in itertools.islice(batches, max_batches):
            inputs, targets = (part[processes.rank :: processes.world] for part in batch)
            if len(inputs):
                logits, targets = logits_of(model, (inputs, targets), task, precision)
                right = (logits.argmax(-1) == targets).sum()
                count = targets.numel()
                sums += torch.stack([cross_entropy(logits, targets) * count, right, right.new_tensor(count)])
    finally:
        model.train(was_training)
    loss, right, count = processes.sum(sums).tolist()
    return (loss / count, right / count) if count else (float("nan"), float("nan"))
