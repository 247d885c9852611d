"""`tsemon demo`: a deep post-norm transformer loses its token diversity, its de-escalated twin does not.

Everything is real: two models train on real data, two monitors stream to a service in a process of its own, and the
table shows what that service answers over REST.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import tsemon
from tsemon.errors import ServerUnreachable, StoreError, TsemonError
from tsemon.train.presets import DIGITS, TEXT, DemoPreset, start
from tsemon_client import Client

EVERY = 5
"""Steps between samples. The demo runs for a minute, so it samples more often than its share of time would allow."""
PLAIN_ROWS = 10
"""Rows printed per run where the output is no terminal."""
SERVER_START_S = 30.0
LOSS_WINDOW = 50
_PR_SET_PDEATHSIG = 1
# Looked up here: between fork and exec another thread's lock may be held for good, the loader's for one.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None


@dataclass
class Row:
    """What the service last said of one run."""

    name: str
    run_id: str = ""
    step: int | None = None
    loss: float | None = None
    similarity: tuple[float | None, float | None, float | None] = (None, None, None)
    alert: dict[str, Any] | None = None
    """The one that fires, else the newest that did."""


def run_demo(*, text: bool, port: int, database: Path) -> None:
    """Train both models and print what the service sees. Ends after the summary, in a terminal only after Ctrl-C."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.soft_wrap = True  # a file or a pipe has no width
    preset = TEXT if text else DIGITS
    for received in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(received, lambda number, _: sys.exit(128 + number))
    with _service(port, database, console) as (url, server):
        with Client(url) as client:
            board = Board(client, [Row(name) for name in _run_names(preset)], preset.num_steps, console)
            losses = _train(preset, url, board, database.parent)
            summarize(console, board, losses, preset)
        if console.is_terminal:
            console.print(f"\nThe page: [bold]{url}/[/]   The API: {url}/docs")
            console.print("Still serving. Ctrl-C ends it.")
            with suppress(KeyboardInterrupt):
                server.wait()
        serve = f"{_command()} serve --database {shlex.quote(f'sqlite:///{database}')}"
        console.print(f"The runs are kept: {serve}", soft_wrap=True, markup=False)


def _command() -> str:
    """How `tsemon` can be called from here."""
    if shutil.which("tsemon"):
        return "tsemon"
    script = Path(sys.executable).with_name("tsemon")
    if script.exists():
        return shlex.quote(os.path.relpath(script))
    return f"{shlex.quote(sys.executable)} -m tsemon"


def _train(preset: DemoPreset, url: str, board: Board, spool_dir: Path) -> dict[str, deque[float]]:
    """Both models in turn, step by step, so that they can be watched side by side."""
    # Small matrices: a second thread costs more than it brings, and the service needs a core too.
    torch.set_num_threads(1)
    losses = {name: deque[float](maxlen=LOSS_WINDOW) for name in _run_names(preset)}
    trainings: list[tuple[str, Iterator[torch.Tensor], tsemon.Monitor]] = []
    try:
        for name, tau in zip(_run_names(preset), (None, preset.tau), strict=True):
            training = start(preset, tau)
            monitor = tsemon.attach(
                training.model,
                training.optimizer,
                run=name,
                project="demo",
                server=url,
                every=EVERY,
                config={**dataclasses.asdict(preset), "tau": tau},
                spool_dir=spool_dir,
                on_alert=board.tell,
            )
            trainings.append((name, training.losses, monitor))
        with board:
            for step in range(preset.num_steps):
                for name, steps, monitor in trainings:
                    loss = next(steps)
                    monitor.step(loss=loss)
                    losses[name].append(float(loss))
                board.advance(step + 1)
    except BaseException:
        for _, _, monitor in trainings:
            monitor.close(state="failed", timeout_s=2.0)
        raise
    for _, _, monitor in trainings:
        monitor.close(timeout_s=30.0)
    return losses


def _run_names(preset: DemoPreset) -> tuple[str, str]:
    return f"{preset.name}-post-norm", f"{preset.name}-de-escalated"


def summarize(console: Console, board: Board, losses: dict[str, deque[float]], preset: DemoPreset) -> None:
    """Print what became of each run, as the service has it now."""
    board.refresh()
    console.print("\n[bold]Summary[/]")
    for row in board.rows:
        mean = sum(losses[row.name]) / len(losses[row.name])
        loss = f"mean loss {mean:.3f} in the last {LOSS_WINDOW} steps, chance is {preset.chance_loss:.3f}"
        if row.alert is None:
            console.print(f"[green]{row.name}: no alert[/]; {loss}")
        else:
            steps = f"at step {row.alert['firing_step']}"
            if row.alert["state"] == "resolved":
                steps += f", resolved at step {row.alert['resolved_step']}"
            console.print(f"[red]{row.name}: {row.alert['rule']} {steps}[/]; {loss}")
            console.print(f"  {row.alert['summary']}")
            for place, layer in row.alert["evidence"].get("layers", {}).items():
                values = ", ".join(
                    f"{name} {value:.3g}" for name, value in layer.items() if name != "layer" and value is not None
                )
                console.print(f"  {place} layer ({layer['layer']}): {values}")


class Board:
    """The live table. It asks the service from a thread of its own: training does not wait for what people look at."""

    def __init__(self, client: Client, rows: list[Row], num_steps: int, console: Console) -> None:
        self._client = client
        self.rows = rows
        self._num_steps = num_steps
        self._console = console
        self._progress = Progress(
            TextColumn("training both"),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("train", total=num_steps)
        self._trouble = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="demo-board", daemon=True)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> Board:
        if self._console.is_terminal:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._console.is_terminal:
            self._live.stop()

    def advance(self, num_done: int) -> None:
        """Called by the training loop after each step of both models."""
        self._progress.update(self._task, completed=num_done)
        if not self._console.is_terminal and num_done % (self._num_steps // PLAIN_ROWS) == 0:
            self.refresh()
            if num_done == self._num_steps // PLAIN_ROWS:
                self._print_plain("step", "run", "loss", "token similarity: first", "middle", "last block", "alert")
            for row in self.rows:
                self._print_plain(*_cells(row))

    def tell(self, alert: tsemon.Alert) -> None:
        """Called by a monitor, on the training thread, when an alert fires or resolves."""
        colour = "red" if alert.state == "firing" else "green"
        step = alert.firing_step if alert.state == "firing" else alert.resolved_step
        text = f"[{colour}]{alert.state}[/] at step {step}: {alert.rule}. {alert.summary}"
        self._console.print(text)

    def refresh(self) -> None:
        """Ask the service for both runs now."""
        try:
            for row in self.rows:
                self._read(row)
            self._trouble = ""
        except ServerUnreachable:
            self._trouble = "the service does not answer; training goes on, frames wait on disk"
        except TsemonError as error:
            self._trouble = str(error)

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            self.refresh()

    def _read(self, row: Row) -> None:
        row.run_id = row.run_id or self._client.find_run(row.name, project="demo")["run_id"]
        run = self._client.run(row.run_id)
        if run["latest"] is not None:
            row.step, row.loss = run["latest"]["step"], run["latest"]["scalars"].get("loss")
            column = self._client.heatmap(row.run_id, "token_similarity", from_step=row.step, columns=1)["values"]
            if column:
                values = column[-1]
                row.similarity = (values[1], values[len(values) // 2], values[-1])
        fired = [
            alert
            for alert in self._client.alerts(run_id=row.run_id)
            if alert["attempt"] == run["attempt"] and alert["firing_step"] is not None
        ]
        row.alert = max(fired, key=lambda alert: alert["state"] == "firing", default=None)

    def _render(self) -> Group:
        return Group(self._table(), self._progress, self._trouble)

    def _table(self) -> Table:
        table = Table(title="token similarity by depth", title_justify="left")
        for name in ("step", "run", "loss", "first block", "middle", "last block", "alert"):
            table.add_column(name, no_wrap=True)
        for row in self.rows:
            step, name, *numbers, alert = _cells(row)
            table.add_row(step, name, *numbers, f"[{'green' if row.alert is None else 'bold red'}]{alert}[/]")
        return table

    def _print_plain(self, step: str, run: str, loss: str, first: str, middle: str, last: str, alert: str) -> None:
        line = f"{step:>5}  {run:<22} {loss:>7} {first:>24} {middle:>8} {last:>11}  {alert}"
        self._console.print(line, soft_wrap=True)


def _cells(row: Row) -> tuple[str, str, str, str, str, str, str]:
    first, middle, last = row.similarity
    if row.alert is None:
        alert = "none"
    elif row.alert["state"] == "firing":
        alert = f"{row.alert['family']} since {row.alert['firing_step']}"
    else:
        alert = f"{row.alert['family']} at {row.alert['firing_step']}, resolved at {row.alert['resolved_step']}"
    step = "-" if row.step is None else str(row.step)
    return step, row.name, _format(row.loss), _format(first), _format(middle), _format(last), alert


@contextmanager
def _service(port: int, database: Path, console: Console) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`tsemon serve` in a process of its own, gone when the block ends."""
    log_path = database.with_suffix(".log")
    try:
        if database.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        database.parent.mkdir(parents=True, exist_ok=True)
        log_file = log_path.open("ab")
    except OSError as error:
        raise StoreError(
            f"expected a file that can be written as --database, got {database}: {error.strerror}; choose another"
        ) from error
    port = _free_port(port)
    url = f"http://127.0.0.1:{port}"
    with log_file:
        command = [sys.executable, "-m", "tsemon", "serve", "--port", str(port), "--database", f"sqlite:///{database}"]
        # Its own group: Ctrl-C is for the demo, which ends the service once the runs are delivered.
        server = subprocess.Popen(
            command,
            stdout=log_file,
            stderr=log_file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(_end_with, os.getpid()),
        )
    try:
        _await_start(server, url, log_path)
        console.print(f"The service runs at [bold]{url}/[/]: open it and watch.")
        yield url, server
    finally:
        server.terminate()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _await_start(server: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + SERVER_START_S
    with Client(url, timeout_s=1.0) as client:
        while time.monotonic() < deadline and server.poll() is None:
            with suppress(ServerUnreachable):
                next(client.runs(), None)
                return
            time.sleep(0.1)
    if server.poll() is None:
        raise ServerUnreachable(f"the service did not start within {SERVER_START_S:.0f} s; its log is {log_path}")
    last = log_path.read_text(errors="replace").strip().rpartition("\n")[2].removeprefix("tsemon: ")
    raise ServerUnreachable(f"the service ended with status {server.returncode}: {last} (its log is {log_path})")


def _end_with(parent: int) -> None:
    """In the service's process: SIGKILL leaves the demo no time to end it, so Linux is asked to."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before it could be asked
            os._exit(1)


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            chosen: int = probe.getsockname()[1]
            return chosen
    raise ServerUnreachable("no port is free on 127.0.0.1")


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
