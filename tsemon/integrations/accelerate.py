"""Accelerate: `monitor = attach(accelerator, model, optimizer, run="gpt")`, then `monitor.step(loss=loss)` a batch."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

import tsemon
from tsemon.errors import needing
from tsemon.wire import RunState

with needing("tsemon.integrations.accelerate needs accelerate; pip install 'tsemon[integrations]'"):
    from accelerate import Accelerator


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    run: str,
    **options: Any,
) -> MainProcessMonitor:
    """Watch what `accelerator.prepare` returned; call `step` on the result in or after every `accelerator.accumulate`.

    `options` are those of `tsemon.attach`. Accelerate does not know the step at which a training goes on: give `resume=`, or
    let it keep the step with everything else, by `accelerator.register_for_checkpointing(monitor)`. Wrong options, and a
    model in which no blocks are found, raise here.
    """
    if not (accelerator.is_main_process or "process_group" in options):
        return MainProcessMonitor(accelerator, None)
    watched = accelerator.unwrap_model(model)
    return MainProcessMonitor(accelerator, tsemon.attach(watched, optimizer, run=run, **options))


class MainProcessMonitor:
    """Counts the batches after which the optimizer steps. Does nothing in processes that were not attached to."""

    def __init__(self, accelerator: Accelerator, monitor: tsemon.Monitor | None) -> None:
        self.monitor = monitor
        """None in other processes than the main one."""
        self._accelerator = accelerator

    def step(self, loss: Tensor | float | None = None, **scalars: Tensor | float) -> None:
        """Mark the end of one batch, with the arguments of `tsemon.Monitor.step`.

        With gradient accumulation only the last batch of a step is recorded, so pass `step_tokens` for the whole step.
        """
        if self.monitor is not None and self._accelerator.sync_gradients:
            self.monitor.step(loss=loss, **scalars)

    @property
    def should_stop(self) -> bool:
        """As `tsemon.Monitor.should_stop`; false in processes that were not attached to."""
        return self.monitor is not None and self.monitor.should_stop

    def state_dict(self) -> dict[str, Any]:
        """As `tsemon.Monitor.state_dict`, so `accelerator.register_for_checkpointing` takes this, too."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `tsemon.Monitor.load_state_dict`."""
        if self.monitor is not None:
            self.monitor.load_state_dict(state)

    def close(self, *, state: RunState = "finished", timeout_s: float = 5.0) -> None:
        """As `tsemon.Monitor.close`."""
        if self.monitor is not None:
            self.monitor.close(state=state, timeout_s=timeout_s)

    def __enter__(self) -> MainProcessMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.monitor is not None:
            self.monitor.__exit__(kind, error, trace)
