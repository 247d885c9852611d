"""Train a model while tsemon watches it, as any user would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tsemon.lab.reproduce.observing import Recording, Values, recorded
from tsemon.lab.train.loop import train_steps
from tsemon.lab.train.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Training:
    """What became of a model that was trained."""

    losses: Values
    """One for each step, from before it."""
    recording: Recording
    evaluations: tuple[Values, Values]
    """The steps after which the model was evaluated, and what that gave."""

    @property
    def first_gradients(self) -> Values:
        """The norm of each block's gradient at step 0."""
        return self.recording.frames[0].layers["grad_norm"]

    def smoothed(self, width: int = 10) -> tuple[Values, Values]:
        """Steps, and the mean loss of each `width` of them."""
        losses = self.losses[: len(self.losses) // width * width].reshape(-1, width)
        middles: Values = np.arange(width / 2, len(self.losses) // width * width, width)
        return middles, losses.mean(axis=1)

    def mean_loss(self, num_steps: int) -> float:
        """Over the last so many steps."""
        return float(self.losses[-num_steps:].mean())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    num_steps: int,
    *,
    every: int,
    measures: Collection[str],
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    task: Task | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    evaluate_every: int = 1,
) -> Training:
    """So many optimizer steps, of which tsemon samples one in `every`. `evaluate` runs in eval mode, without gradients."""
    losses, evaluated, values = [], [], []
    with recorded(model, optimizer, every=every, measures=measures) as recording:
        steps = train_steps(model, optimizer, itertools.islice(batches, num_steps), schedule, task=task)
        for step, loss in enumerate(steps, start=1):
            recording.monitor.step(loss)
            losses.append(float(loss))
            if evaluate is not None and step % evaluate_every == 0:
                evaluated.append(step)
                values.append(_evaluated(model, evaluate))
    return Training(losses=np.array(losses), recording=recording, evaluations=(np.array(evaluated), np.array(values)))


@torch.no_grad()
def _evaluated(model: nn.Module, evaluate: Callable[[nn.Module], float]) -> float:
    model.eval()
    value = evaluate(model)
    model.train()
    return value
