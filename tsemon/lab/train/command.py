"""`tsemon train`: a recipe from its data to its last checkpoint, watched by tsemon."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

import tsemon
from tsemon.attaching import SPOOL_DIR
from tsemon.errors import InvalidArgument
from tsemon.lab.train.checkpoints import Checkpoints, newest_run, run_name
from tsemon.lab.train.datasets import open_data
from tsemon.lab.train.processes import Processes, processes
from tsemon.lab.train.progress import Board
from tsemon.lab.train.recipe import Recipe, TextData
from tsemon.lab.train.training import Training

SHOW_EVERY = 10
"""Steps. To show a loss is to wait for the device, and for all processes."""
PROJECT = "train"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What changes nothing of the numbers."""

    run: str | None = None
    """Name of the run and of its folder of checkpoints. By default the recipe's name and the time."""
    resume: bool = False
    """Go on from the newest checkpoint: of `run`, or of the recipe's run that was saved last."""
    folder: Path = Path("checkpoints")
    checkpoint_every: int | None = None
    """Steps. By default ten times in a run. There is one at the end in any case."""
    keep: int = 2
    """Checkpoints that are kept."""
    monitor: bool = True
    every: int | None = None
    """Steps between samples. By default as tsemon's budget allows."""
    server: str | None = None
    device: str | None = None


def run_recipe(recipe: Recipe, options: Options) -> None:
    """Train, evaluate, save and tell. Under torchrun every process calls it."""
    with processes(options.device) as joined:
        console = Console(highlight=False, quiet=not joined.is_first)
        # Names come from the clock and from files: one process looks, and all use what it saw.
        run = joined.gather(_run_name(recipe, options) if joined.is_first else "")[0]
        checkpoints = Checkpoints(options.folder / run, options.keep)
        with (
            checkpoints.held() if joined.is_first else contextlib.nullcontext(),
            _telling_where_it_stopped(checkpoints, console),
        ):
            with joined.first_alone():
                data = open_data(recipe.data)
            torch.manual_seed(recipe.seed + joined.rank)  # dropout
            training = Training(recipe, data, joined)
            if options.resume:
                training.load_state_dict(checkpoints.load_newest())
            _announce(console, training, run)
            _train(training, _attached(training, run, options, joined), checkpoints, options, joined, console)
            _conclude(console, checkpoints, run, options)


def _run_name(recipe: Recipe, options: Options) -> str:
    named = None if options.run is None else run_name(options.run)
    if options.resume:
        run = named or newest_run(options.folder, recipe.name)
        Checkpoints(options.folder / run).newest()  # before anything is made there
        return run
    run = named or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if Checkpoints(options.folder / run).paths():
        raise InvalidArgument(
            f"{options.folder / run} has checkpoints of an earlier run; go on with it (--resume) or choose another --run"
        )
    return run


def _attached(training: Training, run: str, options: Options, joined: Processes) -> tsemon.Monitor | None:
    if not options.monitor:
        return None
    return tsemon.attach(
        training.model,
        training.optimizer,
        run=run,
        project=PROJECT,
        server=options.server,
        every=options.every,
        config=training.recipe.as_dict(),
        resume=training.step if options.resume else None,
        process_group=joined.group,
    )


def _train(
    training: Training,
    monitor: tsemon.Monitor | None,
    checkpoints: Checkpoints,
    options: Options,
    joined: Processes,
    console: Console,
) -> None:
    recipe = training.recipe
    checkpoint_every = options.checkpoint_every or math.ceil(recipe.steps / 10)
    per_step = recipe.batch_size * (recipe.data.context if isinstance(recipe.data, TextData) else 1)
    board = Board(console, recipe.steps, training.step, training.data.unit)
    with board, monitor or contextlib.nullcontext():
        for loss in training.losses:
            step = training.step
            is_last = step == recipe.steps
            if is_last or step % SHOW_EVERY == 0:
                mean_loss = float(joined.sum(loss)) / joined.world
                board.show(step, mean_loss, training.optimizer.param_groups[0]["lr"], per_step)
            if monitor is not None:
                monitor.step(loss=loss)
            if is_last or (recipe.evaluate_every is not None and step % recipe.evaluate_every == 0):
                evaluated = training.evaluate()
                if evaluated:
                    board.show_evaluation(step, evaluated)
                if monitor is not None:
                    monitor.log(evaluated)
            if is_last or step % checkpoint_every == 0:
                state = training.state_dict()
                if joined.is_first:
                    checkpoints.save(step, state)


@contextlib.contextmanager
def _telling_where_it_stopped(checkpoints: Checkpoints, console: Console) -> Iterator[None]:
    """At Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        saved = checkpoints.paths()
        run = f"--run {checkpoints.folder.name} --resume"
        left = f"{run} goes on from {saved[-1]}" if saved else "there is no checkpoint yet"
        console.print(f"stopped: {left}", markup=False, soft_wrap=True)
        raise


def _announce(console: Console, training: Training, run: str) -> None:
    num_parameters = sum(parameter.numel() for parameter in training.model.parameters())
    start = f", goes on from step {training.step}" if training.step else ""
    console.print(
        f"{run}: {training.recipe.model} of {num_parameters / 1e6:.2f} M parameters on {training.processes.device}{start}",
        markup=False,
        soft_wrap=True,
    )


def _conclude(console: Console, checkpoints: Checkpoints, run: str, options: Options) -> None:
    """Where everything is now."""
    *_, newest = checkpoints.paths() or [checkpoints.folder]
    line = f"checkpoint: {newest}"
    if options.monitor:
        server = options.server or os.environ.get("TSEMON_SERVER")
        place = f"at {server}" if server else f"in the folder {SPOOL_DIR}"
        line += f"   tsemon run: {PROJECT}/{run} {place}"
    console.print(line, markup=False, soft_wrap=True)
