"""Lightning: `Trainer(..., callbacks=[TsemonCallback(run="vit")])`. The same class serves `pytorch_lightning`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import tsemon
from tsemon.errors import needing
from tsemon.integrations.checkpoints import continue_from

with needing("tsemon.integrations.lightning needs lightning; pip install 'tsemon[integrations]'"):
    from lightning.pytorch import Callback, LightningModule, Trainer


class TsemonCallback(Callback):
    """Attaches when the training starts, steps with `trainer.global_step`, and closes when the training ends.

    `options` are those of `tsemon.attach`. What is wrong in them, and a model in which no blocks are found, raises from
    `trainer.fit()`, before its first step. Only the main process attaches, unless
    `options` have a `process_group`, whose processes all do. `monitor` is None before the training.

    The step n of a frame is the one that takes `global_step` from n to n + 1; a training that goes on from a checkpoint
    goes on counting there. Under manual optimization a batch is one step,
    however many optimizer steps it makes.

    Metrics that a validation logs with `self.log` are logged.

    The last step is sampled, whatever the cadence, unless the training stops early, optimizers make several steps a batch,
    or there is a `process_group`.

    `loss` is that of the step's last batch, undivided by the number of accumulated ones; it stays on the device.
    """

    def __init__(self, *, run: str, **options: Any) -> None:
        self.options = {"run": run} | options
        self.monitor: tsemon.Monitor | None = None
        self._global_step = 0
        self._num_steps = math.nan
        self._names_of_training: frozenset[str] | None = None
        """Metrics that were logged before the first validation."""
        self._saved: object = None
        """The monitor's state in the checkpoint that the next training resumes at."""
        self._at_end: dict[str, Any] | None = None
        """The same at the end of the last training. A monitor that is closed has no losses."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        goes_on = trainer.global_step == self._global_step  # or the last training was another one, from another step
        saved = self._saved or (self._at_end if goes_on else None)
        self._saved, self._global_step = None, trainer.global_step
        if trainer.is_global_zero or "process_group" in self.options:
            options: dict[str, Any] = {"resume": trainer.global_step or None} | self.options
            self.monitor = tsemon.attach(pl_module, trainer.optimizers, **options)
            continue_from(self.monitor, saved)
            self._num_steps, self._at_end = math.nan, None
            with contextlib.suppress(Exception):  # Lightning raises if the number of batches a step changes on the way
                self._num_steps = trainer.estimated_stepping_batches
            self.monitor.schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]

    @property
    def state_key(self) -> str:
        """A Trainer may have several of these callbacks."""
        return self._generate_state_key(run=self.options["run"], project=self.options.get("project"))

    def state_dict(self) -> dict[str, Any]:
        return {} if self.monitor is None else {"monitor": self._at_end or self.monitor.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("monitor")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.monitor is not None and trainer.global_step > self._global_step:
            self._global_step = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            if loss is not None and trainer.accumulate_grad_batches > 1:
                loss = loss * trainer.accumulate_grad_batches  # which Lightning divided it by
            if trainer.global_step == self._num_steps - 1 and "process_group" not in self.options:
                self.monitor.burst(1)
            self.monitor.step(loss=loss)
            trainer.should_stop |= self.monitor.should_stop

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._names_of_training is None and not trainer.sanity_checking:
            self._names_of_training = frozenset(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None and not trainer.sanity_checking:
            known = self._names_of_training or frozenset()
            self.monitor.log({name: value for name, value in trainer.callback_metrics.items() if name not in known})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None:
            self._at_end = self.monitor.state_dict()
            self.monitor.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.monitor is not None:
            self.monitor.close(state="failed")

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not attached."""
        return self.__dict__ | {"monitor": None}
