"""A training from its first step to its last, watched by a monitor that writes into a folder, with the loss of each step."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tsemon
from trials.defects import Defect, Lab
from trials.subjects import Make
from tsemon.errors import TsemonError
from tsemon.status import Status
from tsemon.transport.folders import find_spools, quoted
from tsemon.transport.reading import SpoolReader
from tsemon.wire import Array

PROJECT = "detection"
STEPS_AFTER_NAN = 20
"""A loss that is not finite does not come back: the training is ended then."""
EVALUATION_BATCHES = 20
Frames = Iterator[dict[str, Any]]


def adamw(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate)


def sgd(parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training: its setting and, where there is one, its defect."""

    name: str
    subject: Make
    about: str
    family: str = "healthy"
    """Of the failure, as the rules have it; `fresh` for what fits none of them."""
    twin: str = ""
    """The name of the same training without the defect."""
    steps: int = 300
    every: int | None = 5
    """Steps between samples; None leaves it to the monitor."""
    seed: int = 11
    optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer] = adamw
    rate: float = 2.5e-3
    warmup: int = 15
    schedule: Callable[[float], float] = lambda progress: 1.0
    """A factor of the rate at a share of the run."""
    clip_norm: float = 1.0
    accumulation: int = 1
    precision: torch.dtype = torch.float32
    evaluates_every: int | None = None
    """Steps between evaluations."""
    frozen: tuple[str, ...] = ()
    """Modules that are not to train, on purpose."""
    resumed_at: int | None = None
    """The step from which on another attempt goes on from a checkpoint."""
    event_step: int = 0
    """When the defect sets in."""
    defect: Defect | None = None
    shows_in_loss: bool = True
    """Whether a loss above the twin's tells when the harm begins; otherwise it is taken to begin with the defect."""

    @property
    def is_failing(self) -> bool:
        return self.family != "healthy"

    def rate_at(self, step: int) -> float:
        warm = min(1.0, (step + 1) / max(self.warmup, 1))
        return self.rate * warm * self.schedule(step / self.steps)

    def lasting(self, steps: int) -> Trial:
        """The same training with another number of steps. The defect moves with it."""
        return replace(self, steps=steps, event_step=self.event_step * steps // self.steps)

    def failing(self, name: str, family: str, about: str, defect: Defect | None = None, **changes: Any) -> Trial:
        """The same training with one thing wrong."""
        return replace(self, name=name, family=family, about=about, twin=self.name, defect=defect, **changes)


@dataclass
class Losses:
    """What a loss curve shows: each step's loss and gradient norm."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)


def record(trial: Trial, folder: Path, server: str | None = None) -> Status:
    """Train, and leave the losses in the folder and, unless they go to a server, the frames beside them as a spool.

    Returns the monitor's last word.
    """
    losses = Losses()
    torch.manual_seed(trial.seed)
    lab = _lab(trial)
    ends = [trial.steps] if trial.resumed_at is None else [trial.resumed_at, trial.steps]
    for end in ends:
        status = _attempt(trial, lab, end, folder, losses, server)
    path = losses_file(folder, trial.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"loss": losses.loss, "grad_norm": losses.grad_norm}))
    return status


def _lab(trial: Trial) -> Lab:
    subject = trial.subject(trial.seed)
    for name in trial.frozen:
        subject.model.get_submodule(name).requires_grad_(False)
    wanted = [p for p in subject.model.parameters() if p.requires_grad]
    lab = Lab(subject, trial.optimizer(wanted, trial.rate), trial.rate_at, trial.clip_norm)
    if trial.event_step == 0 and trial.defect is not None:
        trial.defect(lab)
    return lab


def _attempt(trial: Trial, lab: Lab, end: int, folder: Path, losses: Losses, server: str | None) -> Status:
    monitor = tsemon.attach(
        lab.model,
        lab.optimizer,
        run=trial.name,
        project=PROJECT,
        server=server,
        every=trial.every,
        blocks=lab.subject.blocks,
        resume=lab.step or None,
        spool_dir=folder / "spools",
        config={"family": trial.family, "about": trial.about, "seed": trial.seed},
    )
    with monitor:
        while lab.step < end and not _is_lost(losses.loss):
            if lab.step == trial.event_step > 0 and trial.defect is not None:
                trial.defect(lab)
            loss = _train(lab, trial, losses)
            monitor.step(loss=loss)
            lab.step += 1
            if trial.evaluates_every and lab.step % trial.evaluates_every == 0:
                _evaluate(lab)
        monitor.close(timeout_s=60.0)  # a busy machine's service may be slow
    if monitor.status.num_faults:
        raise TsemonError(f"{trial.name}: the monitor had to contain {monitor.status.faults}")
    return monitor.status


def _is_lost(loss: list[float]) -> bool:
    return len(loss) >= STEPS_AFTER_NAN and not any(map(math.isfinite, loss[-STEPS_AFTER_NAN:]))


def _train(lab: Lab, trial: Trial, losses: Losses) -> torch.Tensor:
    """One optimizer step."""
    lab.model.train()
    if lab.zeroes_gradients:
        lab.optimizer.zero_grad()
    total = torch.zeros(())
    for _ in range(trial.accumulation):
        inputs, targets = next(lab.subject.batches)
        with torch.autocast("cpu", trial.precision, enabled=trial.precision != torch.float32):
            loss = lab.subject.loss(lab.model, inputs, targets) / trial.accumulation
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    for change in lab.before_update:
        change()
    norm = nn.utils.clip_grad_norm_(lab.model.parameters(), lab.clip_norm)
    for group in lab.optimizer.param_groups:
        group["lr"] = lab.rate(lab.step)
    lab.optimizer.step()
    losses.loss.append(float(total))
    losses.grad_norm.append(float(norm))
    return total


@torch.no_grad()
def _evaluate(lab: Lab) -> None:
    lab.model.eval()
    for inputs, targets in itertools.islice(lab.subject.batches, EVALUATION_BATCHES):
        lab.subject.loss(lab.model, inputs, targets)


def losses_file(folder: Path, name: str) -> Path:
    return folder / "losses" / f"{name}.json"


def read_losses(folder: Path, name: str) -> Losses:
    return Losses(**json.loads(losses_file(folder, name).read_text()))


def spool_folder(root: Path, name: str) -> Path:
    """Where the monitor keeps the attempts of a run."""
    return root / "spools" / PROJECT / quoted(name)


def readers(folder: Path, name: str) -> list[SpoolReader]:
    """The attempts of a run, oldest first."""
    return [
        SpoolReader(found) for found in find_spools(folder / "spools") if found.parent == spool_folder(folder, name)
    ]


def num_samples(folder: Path, name: str) -> int:
    """Number of frames with layers: the last one of a run may have its losses alone."""
    frames = (text for reader in readers(folder, name) for some in reader.new_frames() for text in some)
    return sum(bool(json.loads(text)["layers"]) for text in frames)


def write_trace(trial: Trial, folder: Path, path: Path, chosen: Callable[[Frames], Frames] = iter) -> None:
    """The run as `tsemon replay` reads it: gzipped JSON lines. `chosen` picks the frames of each attempt."""
    losses = read_losses(folder, trial.name)
    attempts = readers(folder, trial.name)
    header = {
        "t": "run",
        "format": "tsemon-trace/1",
        "name": trial.name,
        "family": trial.family,
        "failing": trial.is_failing,
        "gray": False,
        "twin": trial.twin,
        "note": trial.about,
        "layers": len(attempts[0].registration["blocks"]),
        "event_step": trial.event_step,
        "frozen_blocks": attempts[0].registration["frozen_blocks"],
        **({"stacks": stacks} if (stacks := attempts[0].registration.get("stacks")) else {}),
    }
    with gzip.open(path, "wt") as file:
        for line in (
            header,
            {"t": "loss", "loss": _plain(losses.loss), "grad_norm": _plain(losses.grad_norm), "first_step": 0},
        ):
            file.write(json.dumps(line) + "\n")
        for reader in attempts:
            frames = (_trace_frame(json.loads(text)) for some in reader.new_frames() for text in some)
            file.writelines(json.dumps(frame) + "\n" for frame in chosen(frames))
        file.write(json.dumps({"t": "end", "steps": len(losses.loss)}) + "\n")


def _trace_frame(frame: dict[str, Any]) -> dict[str, Any]:
    heads = {name: _rows(packed) for name, packed in frame["heads"].items()}
    layers = {name: _plain(_unpacked(packed)) for name, packed in frame["layers"].items()}
    scalars = {name: None if value is None else float(value) for name, value in frame["scalars"].items()}
    return {"t": "frame", "step": frame["step"], "scalars": scalars, "layers": layers, "heads": heads}


def _rows(packed: dict[str, Any]) -> list[list[float | None]]:
    values, (_, width) = _plain(_unpacked(packed)), packed["shape"]
    return [values[start : start + width] for start in range(0, len(values), width)]


def _unpacked(packed: dict[str, Any]) -> list[float]:
    return Array(tuple(packed["shape"]), base64.b64decode(packed["f32"])).tolist()


def _plain(values: Iterable[float]) -> list[float | None]:
    """NaN is null; the infinities stay as Python writes them."""
    return [None if math.isnan(value) else value for value in values]
