"""Hugging Face's Trainer: `Trainer(..., callbacks=[TsemonCallback(run="bert")])`."""

from __future__ import annotations

import atexit
import weakref
from typing import Any

import tsemon
from tsemon.errors import needing

with needing("tsemon.integrations.transformers needs transformers; pip install 'tsemon[integrations]'"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class TsemonCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches when the training begins, steps with `global_step`, and closes when the training ends.

    `options` are those of `tsemon.attach`. What is wrong in them, and a model in which no blocks are found, raises from
    `trainer.train()`, before its first step. Only the main process attaches, unless
    `options` have a `process_group`, whose processes all do. `monitor` is None before the training.

    The step n of a frame is the one that takes `global_step` from n to n + 1; a training that goes on from a checkpoint
    goes on counting there. Whether mixed precision skipped the update does not matter to the count, as it does not to
    the Trainer's.

    `loss` is what the Trainer logs: the mean over the steps since its last log. The Trainer keeps the loss of each step to
    itself, and to compute it again would wait for the device. So a logged loss goes into the next frame, once; with
    `logging_steps` no longer than the time between samples every frame has one. `loss_mean` and the like are over the logged
    losses since the frame before.

    The Trainer tells nobody that it raised. A run whose end it did not tell of is said to be failed: when its callback
    begins another, when the Trainer is forgotten, and at interpreter exit.
    """

    def __init__(self, *, run: str, **options: Any) -> None:
        self.options = {"run": run} | options
        self.monitor: tsemon.Monitor | None = None
        self._loss: float | None = None
        self._is_new = False
        """Whether no step was told of `_loss` yet."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.monitor is not None:
            self.monitor.close(state="failed")
        if state.is_world_process_zero or "process_group" in self.options:
            options: dict[str, Any] = {"resume": state.global_step or None} | self.options
            self.monitor = tsemon.attach(kwargs["model"], kwargs["optimizer"], **options)
            self.monitor.schedulers = [kwargs["lr_scheduler"]]
            # At exit it is registered after, so called before, the monitor's own end, which knows of no failure here.
            atexit.register(weakref.finalize(self, self.monitor.close, state="failed"))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            self._loss, self._is_new = logs["loss"], True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.monitor is not None:
            is_sampled = self.monitor.is_sampling
            self.monitor.step(loss=self._loss if is_sampled or self._is_new else None)
            self._is_new = False
            if is_sampled:
                self._loss = None
            control.should_training_stop |= self.monitor.should_stop

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not attached."""
        return self.__dict__ | {"monitor": None}
