"""The demo's live table."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import tsemon
from tsemon.errors import ServerUnreachable, TsemonError
from tsemon.terminal import number
from tsemon_client import Client, Incident

PLAIN_ROWS = 10
"""Rows printed per run where the output is no terminal."""


@dataclass
class Row:
    """What the service last said of one run."""

    name: str
    run_id: str = ""
    step: int | None = None
    loss: float | None = None
    diversity: tuple[float | None, float | None, float | None] = (None, None, None)
    incidents: list[Incident] = field(default_factory=list)
    """Those of its last attempt, the oldest first."""


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
                self._print_plain("step", "run", "loss", "token diversity: first", "middle", "last block", "incident")
            for row in self.rows:
                self._print_plain(*_cells(row))

    def tell(self, incident: tsemon.Incident) -> None:
        """Called by a monitor, on the training thread, when an incident opens and when it is over."""
        colour = "red" if incident.is_active else "green"
        self._console.print(
            f"[{colour}]incident {incident.state}[/]: {incident.rule}. {first_clause(incident.summary)}"
        )

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
        row.run_id = row.run_id or self._client.find_run(row.name, project="demo").run_id
        run = self._client.run(row.run_id)
        if run.latest is not None:
            row.step, row.loss = run.latest.step, run.latest.scalars.get("loss")
            column = self._client.heatmap(row.run_id, "token_diversity", from_step=row.step, columns=1).values
            if column:
                values = column[-1]
                row.diversity = (values[1], values[len(values) // 2], values[-1])
        found = self._client.incidents(run_id=row.run_id, attempt=run.attempt)
        row.incidents = sorted(found, key=lambda incident: incident.step)

    def _render(self) -> Group:
        return Group(self._table(), *map(_incidents_of, self.rows), self._progress, self._trouble)

    def _table(self) -> Table:
        table = Table(title="token diversity by depth", title_justify="left")
        for name in ("step", "run", "loss", "first block", "middle", "last block"):
            table.add_column(name, no_wrap=True)
        for row in self.rows:
            *cells, _ = _cells(row)
            table.add_row(*cells)
        return table

    def _print_plain(self, step: str, run: str, loss: str, first: str, middle: str, last: str, incident: str) -> None:
        line = f"{step:>5}  {run:<22} {loss:>7} {first:>24} {middle:>8} {last:>11}  {incident}"
        self._console.print(line, soft_wrap=True)


def _cells(row: Row) -> tuple[str, str, str, str, str, str, str]:
    first, middle, last = row.diversity
    incidents = ", ".join(map(in_brief, row.incidents)) or "none"
    step = "-" if row.step is None else str(row.step)
    return step, row.name, number(row.loss), number(first), number(middle), number(last), incidents


def _incidents_of(row: Row) -> Text:
    """Below the table, which leaves names of rules no room in 80 columns."""
    incidents = ", ".join(map(in_brief, row.incidents)) or "no incident"
    return Text.assemble(f"{row.name}: ", (incidents, "bold red" if row.incidents else "green"))


def first_clause(summary: str) -> str:
    """What is wrong, without the numbers: those fill three lines of a terminal, and the page has room for them."""
    return summary.partition(": ")[0].removesuffix(".")


def in_brief(incident: Incident) -> str:
    """The cause, where and since when."""
    where = f" in {incident.where}" if incident.where else ""
    over = f", recovered at {incident.ended_step}" if incident.state == "recovered" else ""
    return f"{incident.rule}{where} since step {incident.left_step}{over}"
