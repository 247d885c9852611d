"""The training loop, as a generator: whoever drives it decides what happens between steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tsemon.errors import InvalidArgument
from tsemon.train.batches import Batch
from tsemon.train.tasks import Task, cross_entropy


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    *,
    task: Task | None = None,
    clip_norm: float | None = None,
    accumulation: int = 1,
    precision: torch.dtype = torch.float32,
) -> Iterator[Tensor]:
    """Each loss drawn is one optimizer step, over `accumulation` batches; a detached scalar from before the step.

    The loss is the mean over those batches, and its gradient is clipped to a norm of `clip_norm`. With a `precision` below
    float32 the forward pass runs under autocast. The gradients of DDP's ranks meet in the last batch of a step alone.
    Whoever receives a loss still finds the step's gradients and learning rate in place.
    """
    if accumulation < 1:
        raise InvalidArgument(f"accumulation is a number of batches, at least 1, got {accumulation}")
    task = task or Task()
    batches = iter(batches)
    while of_one_step := list(itertools.islice(batches, accumulation)):
        model.train()
        optimizer.zero_grad()
        loss = _accumulate_gradients(model, of_one_step, task, precision)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        yield loss
        if schedule is not None:
            schedule.step()


def _accumulate_gradients(model: nn.Module, batches: list[Batch], task: Task, precision: torch.dtype) -> Tensor:
    """The mean loss of the batches, whose gradients it leaves in the parameters."""
    losses = []
    for number, batch in enumerate(batches, start=1):
        with _synchronised(model, number == len(batches)):
            loss = loss_of(model, batch, task, precision) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def loss_of(model: nn.Module, batch: Batch, task: Task, precision: torch.dtype = torch.float32) -> Tensor:
    """The mean loss of one batch, in nats, on the model's device."""
    logits, targets = logits_of(model, batch, task, precision)
    return cross_entropy(logits, targets)


def logits_of(model: nn.Module, batch: Batch, task: Task, precision: torch.dtype) -> Batch:
    """What the model makes of a batch, in float32 or wider, and the targets beside it."""
    device = next(model.parameters()).device
    inputs, targets = (part.to(device, non_blocking=True) for part in batch)
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        logits = task.logits(model, inputs)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), targets


def _synchronised(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return contextlib.nullcontext()
