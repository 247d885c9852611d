"""What commands print: tables for people, aligned text for pipes, JSON and CSV for programs.

Names come from whoever sent a run. None of their characters may give the terminal an order.
"""

from __future__ import annotations

import csv
import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

ORDERS = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode's categories of what moves the cursor, ends a line, turns the direction of text, or cannot be encoded."""
JOINERS = "\u200c\u200d"
"""Of those, what many scripts are spelled with."""

MIN_WIDTH = 12
"""Characters that a column keeps that may be cut."""

Cell = str | tuple[str, str]
"""A text, or a text and its style."""


@dataclass(frozen=True)
class Column:
    name: str
    right: bool = False
    """Numbers stand under each other."""
    flexible: bool = False
    """A narrow terminal may cut it; ids and numbers stay whole."""
    wraps: bool = False
    """It goes on in the next line there. Only the last column can."""
    spare: bool = False
    """A narrow terminal may leave it out."""

    @property
    def gives(self) -> bool:
        return self.flexible or self.wraps


def printable(text: str) -> str:
    """The text on one line, with what would give a terminal an order written out: an escape reads `\\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in ORDERS and char not in JOINERS else char
        for char in text
    )


FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")
"""Characters with which a cell begins that a spreadsheet runs as a formula, as OWASP lists them ("CSV Injection")."""


def as_cell(value: Any) -> Any:
    """The value of a CSV cell. A text that a spreadsheet would run gets an apostrophe in front; numbers stay as they are."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value


def examples(*commands: str) -> str:
    """The end of a command's help. What follows two spaces and a # explains."""
    lines = []
    for command in commands:
        shown, sign, about = command.partition("  #")
        lines.append(f"{shown}[dim]  #{about}[/dim]" if sign else shown)
    return "\n".join(["[bold]Examples[/bold]", *lines])


def say(text: str, *, err: bool = False) -> None:
    """Print lines."""
    # Not file=: a test's runner puts its own streams in place of these.
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr if err else sys.stdout)


def terminal() -> Console | None:
    """The terminal that we print to; None where it is a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else None


@contextmanager
def progress_bar() -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """A bar on a terminal, nothing elsewhere. Yields functions that print a line and set (done, total)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = terminal()
    if console is None:
        yield say, lambda done, total: None
        return
    with Progress(BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("", total=None)
        yield (
            lambda line: console.print(line, markup=False, soft_wrap=True),
            lambda done, total: bar.update(task, completed=done, total=total),
        )


def print_json(value: Any) -> None:
    """One document, in ASCII: as it is for programs, and without orders for a terminal."""
    print(json.dumps(value, indent=2, default=str))


def print_json_line(value: Any) -> None:
    """One of many documents, for whoever reads while there are more to come."""
    print(json.dumps(value, separators=(",", ":"), default=str), flush=True)


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A line of names, then a line for each row; None is an empty cell."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([as_cell(printable(cell) if isinstance(cell, str) else cell) for cell in row])


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """A table that fits the terminal; in a pipe all of each cell, aligned."""
    from rich.text import Text

    console = terminal()
    lines = [[Text(column.name, "bold") for column in columns], *(list(map(_text, row)) for row in rows)]
    widths = {index: max(line[index].cell_len for line in lines) for index in range(len(columns))}
    if console is not None:
        widths = _fitted(widths, columns, console.width)
    for line in lines:
        whole, rest = Text(), list[Text]()
        for index, width in widths.items():
            cell, gap = line[index], "  " if whole else ""
            if console is not None and columns[index].wraps:
                indent = whole.cell_len + len(gap)
                cell, *rest = cell.wrap(console, width) or [cell]
            elif console is not None:
                cell.truncate(width, overflow="ellipsis")
            room = " " * (width - cell.cell_len)
            whole = Text.assemble(whole, gap, *((room, cell) if columns[index].right else (cell, room)))
        whole.rstrip()
        if console is None:
            print(whole.plain)
            continue
        for part in (whole, *(Text(" " * indent).append_text(part) for part in rest)):
            console.print(part, no_wrap=True, overflow="ellipsis")


def print_heading(text: str) -> None:
    console = terminal()
    if console is None:
        print(printable(text))
        return
    from rich.text import Text

    console.print(Text(printable(text), "bold"))


def print_line(*cells: Cell) -> None:
    """Print cells in one line, two spaces apart. A narrow terminal cuts it."""
    from rich.text import Text

    line, console = Text("  ").join(map(_text, cells)), terminal()
    if console is None:
        print(line.plain)
    else:
        console.print(line, no_wrap=True, overflow="ellipsis")


def print_facts(facts: Iterable[tuple[str, Cell]], *, indent: int = 2, name_width: int = 16) -> None:
    """A line for each: its name, and what is to be said, which goes on below itself where a terminal is narrow."""
    from rich.text import Text

    console = terminal()
    for name, cell in facts:
        head = Text(" " * indent + printable(name), "dim")
        head.append(" " * max(indent + name_width - head.cell_len, 2) if name_width else "")
        text = _text(cell)
        if console is None:
            print(f"{head.plain}{text.plain}".rstrip())
            continue
        below = indent + name_width
        for part in text.wrap(console, max(console.width - max(below, head.cell_len), MIN_WIDTH)) or [text]:
            part.rstrip()
            console.print(head.append_text(part), no_wrap=True, overflow="ellipsis")
            head = Text(" " * below)


def _fitted(widths: dict[int, int], columns: Sequence[Column], room: int) -> dict[int, int]:
    """The columns that are shown, and how wide: first the least needed go, then those are cut that may be."""
    least = {index: min(width, MIN_WIDTH) if columns[index].gives else width for index, width in widths.items()}
    for index in reversed(range(len(columns))):
        if columns[index].spare and _total(least) > room:
            del least[index]
    shown = {index: widths[index] for index in least}
    while _total(shown) > room and shown != least:
        widest = max((index for index in shown if shown[index] > least[index]), key=shown.__getitem__)
        shown[widest] -= 1
    return shown


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _text(cell: Cell) -> Text:
    from rich.text import Text

    text, style = (cell, "") if isinstance(cell, str) else cell
    return Text(printable(text), style)


def number(value: float | None) -> str:
    """Five digits that count; a dash where there is none."""
    return "-" if value is None else f"{value:.5g}"


def count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def moment(time: datetime | None) -> str:
    return "-" if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def ago(time: datetime, now: datetime) -> str:
    """How long ago, in its largest unit: 40 s, 12 min, 3 h, 5 d."""
    seconds = max((now - time).total_seconds(), 0.0)
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"
