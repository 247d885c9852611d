"""Writes each frame's numbers into a run of Weights & Biases."""

from __future__ import annotations

import re
from typing import Any

from tsemon.errors import InvalidArgument, MissingPackage, needing
from tsemon.mirrors.numbers import PREFIX, Layers, checked_layers, numbers_of
from tsemon.wire import Frame

OLDEST = "0.19.10"
"""The first version that can make a run beside another that is under way."""

STEP = f"{PREFIX}step"
"""The optimizer step, the axis of all numbers of the mirror: W&B's own step counts rows, whoever logs them."""


class WandB:
    """A run of W&B: yours, or one of its own where none is given, made by `wandb.init` with these options.

    W&B numbers rows by a step that only grows, and drops what is logged for an earlier one. So in a run of yours the
    mirror makes no rows: each frame goes into the row that your next `log` ends, in place of the frame that was there.
    `commit=True` gives every frame a row of its own: for a run to which you log nothing, or never with `step=`.

    Raises MissingPackage, and what `wandb.init` raises.
    """

    def __init__(
        self, run: Any = None, *, layers: Layers = "aggregates", commit: bool | None = None, **init: Any
    ) -> None:
        with needing("a mirror in W&B needs wandb; pip install wandb"):
            import wandb
        if _numbers(wandb.__version__) < _numbers(OLDEST):
            raise MissingPackage(
                f"a mirror in W&B needs wandb {OLDEST} or newer, got {wandb.__version__}; pip install -U wandb"
            )
        self._layers = checked_layers(layers)
        if run is not None and (init or not callable(getattr(run, "log", None))):
            what = f"options of wandb.init ({', '.join(init)}) beside one" if init else type(run).__name__
            raise InvalidArgument(f"WandB(run) takes what wandb.init returned, got {what}")
        self._is_own = run is None
        self._run: Any = wandb.init(**{"reinit": "create_new", **init}) if run is None else run
        self._name = self._run.name or self._run.id
        self._commits = self._is_own if commit is None else commit
        self._row: int | None = None
        """The row that holds a frame, and has not ended as far as is known."""
        self.num_skipped = 0
        """Frames in whose place a newer one went into the row."""
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric(f"{PREFIX}*", step_metric=STEP)

    def write(self, frame: Frame) -> None:
        """Put the frame's numbers into a row. What only an earlier frame of the row has, stays in it."""
        self._run.log({STEP: frame.step, **numbers_of(frame, self._layers)}, commit=self._commits)
        if not self._commits:
            row = self._run.step  # asks W&B's service: after `log`, which raises at once where the run is finished
            self.num_skipped += row == self._row
            self._row = row

    def close(self) -> None:
        """Finish the run if it is the mirror's own."""
        if self._is_own:
            self._run.finish()

    def __str__(self) -> str:
        return f"WandB({self._name})"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
