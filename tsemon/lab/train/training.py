"""From a recipe to a training: model, optimizer, schedule and batches, the loop that joins them, and the state of it all."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tsemon import models
from tsemon.catalogue import nearest
from tsemon.errors import InvalidArgument, TsemonError
from tsemon.lab.train import schedules
from tsemon.lab.train.batches import Shard
from tsemon.lab.train.datasets import DataSet, open_data
from tsemon.lab.train.evaluation import evaluate
from tsemon.lab.train.loop import train_steps
from tsemon.lab.train.processes import Processes
from tsemon.lab.train.recipe import PRECISIONS, Recipe
from tsemon.lab.train.tasks import FILL_IN_MASKS, task_of

MAY_DIFFER = ("about", "steps", "evaluate_every", "evaluation_batches")
"""What a resumed run may do otherwise than the one before. More steps stretch a cosine."""
DATA_DECIDE = {
    "context": "data.context",
    "vocab": "data.tokenizer and data.vocab",
    "image_size": "the images and, where they are files, data.image_size",
}
"""Where sizes come from that are no settings of a model."""
ALONE = Processes()


class Training:
    """A recipe on its way. Each loss drawn from `losses` is one optimizer step, until the recipe's steps are used up.

    Making one leaves the global random state as it is. All processes hold the same model and see their rows of each batch.
    """

    def __init__(self, recipe: Recipe, data: DataSet | None = None, processes: Processes = ALONE) -> None:
        self.recipe = recipe
        self.data = open_data(recipe.data) if data is None else data
        self.step = 0
        """Optimizer steps done."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = build_model(recipe, self.data.sizes).to(processes.device)
        self.optimizer = _optimizer(recipe, self.model)
        self.losses = self._losses()
        self.processes = processes
        self._schedule = schedule_of(recipe, self.optimizer)
        self._task = task_of(self.model, recipe.seed * processes.world + processes.rank)
        self._rows = recipe.rows_of_batch(processes.world)
        self._batches = Shard(self.data.batches(self._rows, recipe.seed), processes.rank, processes.world)
        self._precision = PRECISIONS[recipe.precision]
        if recipe.compile:
            self.model.compile()

    def _losses(self) -> Iterator[Tensor]:
        steps = train_steps(
            self.model if self.processes.group is None else self._distributed(),
            self.optimizer,
            self._batches,
            self._schedule,
            task=self._task,
            clip_norm=self.recipe.clip_norm,
            accumulation=self.recipe.accumulation,
            precision=self._precision,
        )
        for loss in itertools.islice(steps, self.recipe.steps - self.step):
            self.step += 1
            yield loss

    def _distributed(self) -> nn.Module:
        return DistributedDataParallel(self.model, process_group=self.processes.group)

    def evaluate(self) -> dict[str, float]:
        """`validation_loss`, the mean in nats, and what it means; nothing where no data were set apart."""
        batches = self.data.validation_batches(self._rows)
        means = evaluate(
            self.model,
            batches,
            self._task,
            precision=self._precision,
            max_batches=self.recipe.evaluation_batches,
            processes=self.processes,
        )
        return {} if means is None else {"validation_loss": means[0], **self._task.meaning(self.data, *means)}

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the steps to come. Processes call it together."""
        return {
            "step": self.step,
            "recipe": self.recipe.as_dict(),
            "sizes": dict(self.data.sizes),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "batches": self._batches.state_dict(),
            "processes": self.processes.gather(self._state_of_process()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, before the first loss is drawn: the steps to come are those of a run without interruption.

        Raises InvalidArgument where the state is of another recipe or of another number of processes.
        """
        self._check(state)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        with warnings.catch_warnings():  # PyTorch misses the step of the optimizer, which was in another process
            warnings.simplefilter("ignore", UserWarning)
            self._schedule.step()  # the loop had not come to it when it was saved
        self._batches.load_state_dict(state["batches"])
        self._load_state_of_process(state["processes"][self.processes.rank])

    def _state_of_process(self) -> dict[str, Any]:
        device = self.processes.device
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return {"task": self._task.state_dict(), "cpu": torch.random.get_rng_state(), "cuda": cuda}

    def _load_state_of_process(self, state: Mapping[str, Any]) -> None:
        self._task.load_state_dict(state["task"], self.processes.device)
        torch.random.set_rng_state(state["cpu"])
        if state["cuda"] is not None and self.processes.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.processes.device)

    def _check(self, state: Mapping[str, Any]) -> None:
        if len(state["processes"]) != self.processes.world:
            raise InvalidArgument(
                f"the checkpoint was saved by {len(state['processes'])} processes, these are {self.processes.world}; "
                "resume with as many"
            )
        before, now = _comparable(state["recipe"]), _comparable(self.recipe.as_dict())
        differing = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
        if differing:
            changes = ", ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in differing)
            raise InvalidArgument(f"the checkpoint is of another recipe: {changes}; resume with the same settings")
        if state["step"] > self.recipe.steps:
            raise InvalidArgument(
                f"the checkpoint is already at step {state['step']}, and the run is to end at step {self.recipe.steps}; "
                f"resume with --steps of {state['step']} or more"
            )


def build_model(recipe: Recipe, data_sizes: Mapping[str, int]) -> nn.Module:
    """The recipe's model. Sizes that the data decide go where the model's config has them."""
    kind, config_kind = (getattr(models, name, None) for name in (recipe.model, f"{recipe.model}Config"))
    if kind is None or config_kind is None:
        known = [name.removesuffix("Config") for name in models.__all__ if name.endswith("Config")]
        raise InvalidArgument(f"tsemon.models has no {recipe.model!r}; {nearest(recipe.model, known)}")
    fields = [field.name for field in dataclasses.fields(config_kind)]
    if kind in FILL_IN_MASKS and "vocab" in data_sizes:
        data_sizes = {**data_sizes, "vocab": data_sizes["vocab"] + 1}
    for name in recipe.sizes:
        if name not in fields:
            raise InvalidArgument(f"{recipe.model} has no size named {name!r}; {nearest(name, fields)}")
        if name in data_sizes:
            source = DATA_DECIDE.get(name, "the data")
            raise InvalidArgument(f"sizes.{name} follows from {source} and is {data_sizes[name]}; leave it out")
    sizes = {**recipe.sizes, **{name: size for name, size in data_sizes.items() if name in fields}}
    try:
        model: nn.Module = (
            kind(config_kind(**sizes)) if recipe.preset is None else kind.from_preset(recipe.preset, **sizes)
        )
    except TsemonError:
        raise
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:  # from PyTorch, wherever a size was used
        told = ", ".join(f"{name}={size!r}" for name, size in sizes.items())
        reason = str(error).partition("\n")[0]
        raise InvalidArgument(f"{recipe.model} cannot be made with the sizes {told}: {reason}") from error
    return model


def schedule_of(recipe: Recipe, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    match recipe.schedule:
        case "constant":
            return schedules.constant(optimizer, warmup=recipe.warmup)
        case "cosine":
            return schedules.cosine(optimizer, warmup=recipe.warmup, total=recipe.steps, final_ratio=recipe.final_ratio)
        case "inverse-sqrt":
            return schedules.inverse_sqrt(optimizer, warmup=recipe.warmup)
        case "multi-step":
            return schedules.multi_step(optimizer, warmup=recipe.warmup, total=recipe.steps)


def _comparable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that must be equal, by name. Data may lie elsewhere than before. Older recipes lack new settings."""
    defaults = {one.name: one.default for one in dataclasses.fields(Recipe) if one.default is not dataclasses.MISSING}
    flat = {key: value for key, value in (defaults | dict(recipe)).items() if key not in (*MAY_DIFFER, "data", "sizes")}
    for group in ("data", "sizes"):
        flat |= {
            f"{group}.{key}": value for key, value in recipe[group].items() if key not in ("path", "cache", "source")
        }
    return flat


def _optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    rate, decay = recipe.learning_rate, recipe.weight_decay
    if recipe.optimizer == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=rate, weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=recipe.betas, weight_decay=decay)
