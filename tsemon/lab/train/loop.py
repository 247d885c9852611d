"""The training loop, as a generator: whoever drives it decides what happens between steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tsemon.errors import InvalidArgument
from tsemon.lab.train.batches import Batch
from tsemon.lab.train.tasks import Task


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
    device = next(model.parameters()).device
    losses = []
    for number, batch in enumerate(batches, start=1):
        with _synchronised(model, number == len(batches)):
            with autocast(device, precision):
                loss = task.loss(model, *on_device(batch, device)) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """Forward passes in a precision below float32; in float32 it changes nothing."""
    return torch.autocast(device.type, precision, enabled=precision != torch.float32)


def on_device(batch: Batch, device: torch.device) -> Batch:
    inputs, targets = (part.to(device, non_blocking=True) for part in batch)
    return inputs, targets


def _synchronised(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return contextlib.nullcontext()
