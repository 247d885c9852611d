"""Ways to make one training step: with no monitor, with tsemon, and with what people use or write instead.

Axes: `B` batch, `T` tokens, `D` width.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import torch
from figures import Spent
from torch import Tensor, nn
from workload import Workload

import tsemon
from tsemon.catalogue import CATALOGUE

NEVER = 10**12
"""A step that no run reaches."""


def unhooked(monitor: tsemon.Monitor) -> Any:
    """Take the hook that reads a gradient out of the optimizer. Return it; None on a GPU."""
    witness = monitor._probe._witness
    while witness is not None and witness._handles:
        witness._handles.pop().remove()
    return witness


class Unavailable(Exception):
    """This condition cannot be measured here; the text says why."""


class Condition:
    """A step without a monitor. The others hook themselves in before their own steps and out again after them."""

    name: ClassVar[str] = "none"

    def __init__(self, work: Workload, folder: Path) -> None:
        self.work = work
        self.spent: list[Spent] = []

    def hook(self) -> None:
        """Get ready, before the clock starts."""

    def step(self) -> None:
        self.work.step()

    def unhook(self) -> None:
        """Leave nothing to the step of another condition."""

    def forget(self) -> None:
        """Start the record anew."""
        self.spent.clear()

    def close(self) -> None:
        """The last step is done."""


class Unsampled(Condition):
    """tsemon attached, on a step that it does not sample."""

    name = "unsampled"
    measures: ClassVar[tuple[str, ...]] = ("default",)

    def __init__(self, work: Workload, folder: Path) -> None:
        super().__init__(work, folder)
        # With a budget, as by default, because only then losses and a gradient are watched. But no cadence decides here
        # which steps are sampled: the order of the conditions is drawn.
        options: Any = {"run": self.name, "measures": self.measures, "budget": 1e-9, "spool_dir": folder}
        self.monitor = tsemon.attach(work.model, work.optimizer, **options)
        self.monitor._cadence.zoom_in = lambda *_, **__: False
        self.monitor.step(self.work.step())  # the first step is always sampled
        self.monitor._next_sample = NEVER
        self._witness = unhooked(self.monitor)
        self.calls_s: list[float] = []
        """Seconds in monitor.step()."""

    def hook(self) -> None:
        if self._witness is not None:
            self._handle = self.work.optimizer.register_step_pre_hook(self._witness)

    def unhook(self) -> None:
        if self._witness is not None:
            self._handle.remove()

    def step(self) -> None:
        loss = self.work.step()
        start = time.perf_counter()
        self.monitor.step(loss=loss)
        self.calls_s.append(time.perf_counter() - start)

    def forget(self) -> None:
        super().forget()
        self.calls_s.clear()

    def close(self) -> None:
        self.monitor.close()


class Sampled(Unsampled):
    """tsemon with all default measures on this step. Its hooks go in and come out within the step that is timed."""

    name = "sampled"
    tiers: tuple[str, ...] = ("every",)

    def __init__(self, work: Workload, folder: Path) -> None:
        super().__init__(work, folder)
        self.collects_s: list[float] = []
        """Of a call of monitor.step(), the seconds in which the measures finish their reductions."""
        self._collect = self.monitor._probe.collect
        self.monitor._probe.collect = self._timed_collect

    def step(self) -> None:
        self.monitor._next_sample = self.monitor._step
        self.monitor._probe.arm({name for name, tier in self.monitor._tiers.items() if tier in self.tiers})
        super().step()

    def forget(self) -> None:
        super().forget()
        self.collects_s.clear()

    @property
    def beyond_s(self) -> list[float]:
        """What monitor.step() does beyond the measures: packing, handing over, choosing the next sample."""
        return [call - collect for call, collect in zip(self.calls_s, self.collects_s, strict=True)]

    def _timed_collect(self, **options: Any) -> Any:
        start = time.perf_counter()
        reading = self._collect(**options)
        self.collects_s.append(time.perf_counter() - start)
        return reading


class SampledSlow(Sampled):
    """tsemon with all default measures and those of the slow tier, as in every tenth sample."""

    name = "sampled, slow tier too"
    tiers = ("every", "slow")


class SampledOnDemand(Sampled):
    """The same with all measures on demand."""

    name = "sampled, those on demand too"
    tiers = ("every", "slow", "demand")
    measures = ("default", *(metric.name for metric in CATALOGUE if metric.tier == "demand"))


class NaiveHooks(Condition):
    """A token similarity per block by its Gram matrix, and norms of parameters and gradients, each read at once.

    Such hooks are not called inside a compiled graph, so this step calls the model uncompiled.
    """

    name = "naive hooks"

    def hook(self) -> None:
        self.read: list[float] = []
        self._handles = [block.register_forward_hook(self._read_block) for block in self.work.model.blocks]

    def step(self) -> None:
        self.work.gradients(self.work.model)
        for parameter in self.work.model.parameters():
            self.read += [parameter.detach().norm().item(), parameter.grad.norm().item()]
        self.work.optimizer.step()

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _read_block(self, block: nn.Module, args: Any, output: Tensor) -> None:
        x_BTD = output.detach()
        gram_BTT = x_BTD @ x_BTD.mT
        similarity_B = gram_BTT.mean(dim=(1, 2)) / gram_BTT.diagonal(dim1=1, dim2=2).sum(dim=1)
        self.read.append((similarity_B * x_BTD.shape[1]).mean().item())


class WandbWatch(Condition):
    """wandb.watch(log="all") at each step, offline. Its record of system statistics is off: it would run beside all."""

    name = 'wandb.watch(log="all")'

    def __init__(self, work: Workload, folder: Path) -> None:
        super().__init__(work, folder)
        try:
            import wandb
        except ImportError:
            raise Unavailable("`pip install wandb` first") from None
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        self._run = wandb.init(mode="offline", project="overhead", dir=str(folder), settings=settings)

    def hook(self) -> None:
        self._run.watch(self.work.called, log="all", log_freq=1)

    def step(self) -> None:
        loss = self.work.step()
        self._run.log({"loss": loss.item()})

    def unhook(self) -> None:
        self._run.unwatch([self.work.called])  # in a list: wandb asks for its truth, and a compiled model has none

    def close(self) -> None:
        self._run.finish()


def free_bytes(device: torch.device) -> int:
    """What a condition may take for itself."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 * 2**30
