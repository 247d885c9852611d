"""`tsemon demo`: a deep post-norm transformer loses its token diversity, its de-escalated twin does not.

Everything is real: two models train on real data, two monitors stream to a service in a process of its own, and the
table shows what that service answers over REST.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from rich.console import Console

import tsemon
from tsemon.lab.demo.board import Board, Row, first_clause, in_brief
from tsemon.lab.demo.service import service
from tsemon.lab.demo.twins import Twins
from tsemon.lab.train.training import Training
from tsemon_client import Client

EVERY = 5
"""Steps between samples. The demo runs for a minute, so it samples more often than its share of time would allow."""
LOSS_WINDOW = 50


def run_demo(twins: Twins, *, port: int, database: Path) -> None:
    """Train both models and print what the service sees. Ends after the summary, in a terminal only after Ctrl-C."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.soft_wrap = True  # a file or a pipe has no width
    for received in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(received, lambda number, _: sys.exit(128 + number))
    with service(port, database, console) as (url, server):
        with Client(url, retries=0) as client:  # the board asks again anyway
            board = Board(client, [Row(name) for name in _run_names(twins)], twins.recipe.steps, console)
            losses = _train(twins, url, board, database.parent)
            summarize(console, board, losses, twins)
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


def _train(twins: Twins, url: str, board: Board, spool_dir: Path) -> dict[str, deque[float]]:
    """Both models in turn, step by step, so that they can be watched side by side."""
    # Small matrices: a second thread costs more than it brings, and the service needs a core too.
    torch.set_num_threads(1)
    losses = {name: deque[float](maxlen=LOSS_WINDOW) for name in _run_names(twins)}
    trainings: list[tuple[str, Iterator[torch.Tensor], tsemon.Monitor]] = []
    try:
        for name, tau in zip(_run_names(twins), (None, twins.tau), strict=True):
            training = Training(twins.with_tau(tau))
            monitor = tsemon.attach(
                training.model,
                training.optimizer,
                run=name,
                project="demo",
                server=url,
                every=EVERY,
                config=training.recipe.as_dict(),
                spool_dir=spool_dir,
                on_incident=board.tell,
            )
            trainings.append((name, training.losses, monitor))
        with board:
            for step in range(twins.recipe.steps):
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


def _run_names(twins: Twins) -> tuple[str, str]:
    return f"{twins.recipe.name}-post-norm", f"{twins.recipe.name}-de-escalated"


def summarize(console: Console, board: Board, losses: dict[str, deque[float]], twins: Twins) -> None:
    """Print what became of each run, as the service has it now."""
    board.refresh()
    console.print("\n[bold]Summary[/]")
    for row in board.rows:
        mean = sum(losses[row.name]) / len(losses[row.name])
        loss = f"mean loss {mean:.3f} in the last {LOSS_WINDOW} steps, chance is {twins.chance_loss:.3f}"
        if not row.incidents:
            console.print(f"[green]{row.name}: no incident[/]; {loss}")
        for incident in row.incidents:
            console.print(f"[red]{row.name}: {in_brief(incident)}[/]; {loss}")
            console.print(f"  {first_clause(incident.summary)}.")
            console.print(f"  What to try: {incident.advice['text']}")
            console.print(f"  Also fired: {', '.join(incident.alerts[1:]) or '-'}")
