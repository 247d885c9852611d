"""What a person sees of a training: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Board:
    """Shows loss, learning rate and speed of the steps that it is told of. `unit` is what is counted per second."""

    def __init__(self, console: Console, num_steps: int, first_step: int, unit: str) -> None:
        self._console = console
        self._num_steps, self._unit = num_steps, unit
        self._last_step, self._last_time = first_step, time.perf_counter()
        self._progress = Progress(
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=first_step)

    def __enter__(self) -> Board:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, step: int, loss: float, learning_rate: float, rows_per_step: int) -> None:
        """The state after a step, and the mean speed since the last one shown."""
        now = time.perf_counter()
        speed = rows_per_step * (step - self._last_step) / max(now - self._last_time, 1e-9)
        self._last_step, self._last_time = step, now
        text = f"loss {loss:.4f}  lr {learning_rate:.2e}  {speed:,.0f} {self._unit}/s"
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step, description=text)
        else:
            self.say(f"step {step}/{self._num_steps}  {text}")

    def show_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        told = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in results.items())
        self.say(f"step {step}/{self._num_steps}  {told}")
        self._last_time = time.perf_counter()  # the speed is that of training

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)
