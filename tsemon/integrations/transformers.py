"""Hugging Face's Trainer: `Trainer(..., callbacks=[TsemonCallback(run="bert")])`."""

from __future__ import annotations

import atexit
import json
import math
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor

import tsemon
from tsemon.errors import needing
from tsemon.integrations.checkpoints import LOSSES_UNKNOWN, continue_from
from tsemon.probes.output_loss import OutputLoss

with needing("tsemon.integrations.transformers needs transformers; pip install 'tsemon[integrations]'"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


NOT_KNOWN = (
    "the loss of each step is not known, because {why}. The frames have the mean that the Trainer logs every {steps} steps, "
    "in which NaN is replaced. With label smoothing, compute_loss_func, your own compute_loss or torch.compile, "
    "set logging_steps=1 and logging_nan_inf_filter=False. Otherwise let the model return the loss that it is trained with"
)

ANOTHER = (
    "the model returns another loss than the Trainer optimizes: over the last steps, the mean of the model's is "
    "{returned:.4g}, and the mean of the Trainer's is {logged:.4g}. The frames have the model's"
)


class TsemonCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches when the training begins, steps with `global_step`, and closes when the training ends.

    `options` are those of `tsemon.attach`. What is wrong in them, and a model in which no blocks are found, raises from
    `trainer.train()`, before its first step. Only the main process attaches, unless
    `options` have a `process_group`, whose processes all do. `monitor` is None before the training.

    The step n of a frame is the one that takes `global_step` from n to n + 1; a training that goes on from a checkpoint
    goes on counting there. Whether mixed precision skipped the update does not matter to the count, as it does not to
    the Trainer's.

    `loss` is the one in the model's outputs, the mean over the accumulated batches: the Trainer passes the loss of a step to
    no callback, and replaces NaN in the mean that it logs. If that mean shows that the Trainer optimizes more than this
    loss, the callback warns. If the outputs have no loss, or the Trainer does not optimize it, the callback warns, and the
    frames have the logged means. Each goes into the next frame, once, and `loss_mean` and
    the like are over the logged means since the frame before.

    Results of evaluations, such as `eval_loss`, are logged.

    The last step is sampled, whatever the cadence, unless the training stops early or there is a `process_group`.

    The Trainer tells nobody that it raised. A run whose end it did not tell of is said to be failed: when its callback
    begins another, when the Trainer is forgotten, and at interpreter exit.
    """

    def __init__(self, *, run: str, **options: Any) -> None:
        self.options = {"run": run} | options
        self.monitor: tsemon.Monitor | None = None
        self._loss: float | None = None
        """The newest mean that the Trainer logged. Used only without `_output_loss`."""
        self._is_new = False
        """Whether no step was given `_loss` yet."""
        self._output_loss: OutputLoss | None = None
        """None if the loss of each step is not known."""
        self._is_another = False
        """Whether the Trainer optimizes another loss than `_output_loss`."""
        self._num_substeps = 0
        """Number of batches of this step so far, except for the last one."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.monitor is not None:
            self.monitor.close(state="failed")
        if state.is_world_process_zero or "process_group" in self.options:
            options: dict[str, Any] = {"resume": state.global_step or None} | self.options
            self.monitor = tsemon.attach(kwargs["model"], kwargs["optimizer"], **options)
            self.monitor.schedulers = [kwargs["lr_scheduler"]]
            if state.global_step and "process_group" not in self.options:  # another process may not see the folder
                try:
                    saved = json.loads(_state_in_checkpoint(args, state).read_text())
                except (OSError, ValueError, RecursionError) as error:
                    self.monitor.warn(LOSSES_UNKNOWN.format(error=error))
                else:
                    continue_from(self.monitor, saved)
            self._output_loss = self.monitor.watch_output_loss()
            self._loss, self._is_new, self._is_another, self._num_substeps = None, False, False, 0
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
            if self._output_loss is not None and args.world_size == 1 and not self._is_another:
                self._compare(self._output_loss, logs["loss"])

    def _compare(self, output_loss: OutputLoss, logged: float) -> None:
        """Warn once if the mean that the Trainer logs is another one. If losses are not finite, it leaves them out."""
        returned = output_loss.mean()
        if returned is None or not math.isfinite(returned) or self.monitor is None:
            return
        self._is_another = abs(logged - returned) > 1e-3 + 0.01 * abs(logged)  # more than rounding
        if self._is_another:
            self.monitor.warn(ANOTHER.format(logged=logged, returned=returned))

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._num_substeps += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.monitor is not None:
            if state.global_step == state.max_steps - 1 and "process_group" not in self.options:
                self.monitor.burst(1)
            self.monitor.step(loss=self._loss_of_step(self.monitor, args, kwargs["model"]))
            control.should_training_stop |= self.monitor.should_stop

    def _loss_of_step(self, monitor: tsemon.Monitor, args: TrainingArguments, model: Any) -> Tensor | float | None:
        num_batches, self._num_substeps = self._num_substeps + 1, 0
        if self._output_loss is not None:
            loss = self._output_loss.take(num_batches, _scale(args, model))
            if not self._output_loss.why_not:
                return loss
            if not _logs_each_step(args):
                monitor.warn(NOT_KNOWN.format(why=self._output_loss.why_not, steps=args.logging_steps))
            self._output_loss.close()
            self._output_loss = None
        logged = self._loss if monitor.is_sampling or self._is_new else None
        self._is_new = False
        if monitor.is_sampling:
            self._loss = None
        return logged

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.monitor is not None and metrics is not None:
            self.monitor.log({name: value for name, value in metrics.items() if isinstance(value, int | float)})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        file = _state_in_checkpoint(args, state)
        if self.monitor is not None and "process_group" not in self.options and file.parent.is_dir():
            try:
                file.write_text(json.dumps(self.monitor.state_dict()))
            except OSError as error:
                self.monitor.warn(
                    f"the checkpoint lacks {file.name}, so losses after it are not compared with earlier ones: {error}"
                )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not attached."""
        return self.__dict__ | {"monitor": None, "_output_loss": None}


def _state_in_checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Beside trainer_state.json. The Trainer does not say from which folder it resumes; usually it is this one."""
    return Path(args.output_dir or "", f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", "tsemon_state.json")


def _scale(args: TrainingArguments, model: Any) -> float:
    """What the Trainer multiplies a loss by that was divided by the number of items on all devices."""
    if not getattr(args, "average_tokens_across_devices", False):
        return 1.0
    num_processes: int = args.world_size
    num_alike: int = getattr(model, "_tp_size", None) or 1
    return num_processes / num_alike


def _logs_each_step(args: TrainingArguments) -> bool:
    return args.logging_strategy == "steps" and args.logging_steps == 1 and not args.logging_nan_inf_filter
