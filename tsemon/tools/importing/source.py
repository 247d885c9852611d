"""What every reader gives: runs, the logs that they were written in, and the rows of these in the order of writing."""

from __future__ import annotations

import hashlib
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tsemon.wire import MAX_STEP, RunState

GROWING_S = 30.0
"""A file that was written to so lately may be in the middle of a record."""


MOST_NAMED = 1000
"""Of each kind of thing left out, so many are remembered by name."""


class Row(NamedTuple):
    """Some numbers of one step, as they stand at one place of a log."""

    ordinal: int
    """The place: counted from 0, the same for ever, since logs only grow at their end."""
    step: int
    time: float
    values: Sequence[tuple[str, float]]
    place: int
    """How much of `Log.size` is read with it."""


class Notes:
    """What is told of a source besides its rows."""

    def __init__(self) -> None:
        self.damages: list[str] = []
        """What could not be read, and was to be."""
        self.remarks: list[str] = []
        self._left_out: dict[str, set[str]] = {}

    def damage(self, text: str) -> None:
        """Something is lost."""
        self.damages.append(text)

    def remark(self, text: str) -> None:
        """Something is as it should be, and yet to be known."""
        if text not in self.remarks:
            self.remarks.append(text)

    def leave_out(self, what: str, name: str) -> None:
        """This name has values of a kind that is not imported."""
        names = self._left_out.setdefault(what, set())
        if len(names) < MOST_NAMED:
            names.add(name)

    def step(self, value: object, name: str) -> int | None:
        """A step that a frame can have; None for any other, whose value of this name is left out."""
        step = as_step(value)
        if step is None:
            self.leave_out("steps that are no whole numbers from 0 to 2^53 - 1", name)
        return step

    def left_out(self) -> list[str]:
        """One line for each kind."""
        return [f"left out, {what}: {some(sorted(names))}" for what, names in sorted(self._left_out.items())]


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    shown = ", ".join(name[:60] for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


class Log(ABC):
    """One file, or one run's part of a database, to which rows are only appended."""

    name: str
    """The same wherever the file lies; another one for each log of a run."""
    size: int
    """For the progress bar."""

    @abstractmethod
    def rows(self, notes: Notes) -> Iterator[Row]:
        """All rows, from the first. Raises OSError or ValueError where the log cannot be read."""


class FileLog(Log):
    """A log that is a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.size = path.stat().st_size

    @property
    def modified(self) -> float:
        """When it was written to, in seconds since 1970: the time of rows that tell none."""
        return self.path.stat().st_mtime

    def is_torn(self, notes: Notes) -> None:
        """Note that the file ends in the middle of a record."""
        if not self.is_growing(notes):
            notes.damage(f"{self.path} ends in the middle of a record; what is before it is imported")

    def is_growing(self, notes: Notes) -> bool:
        """Whether the file was written to just now; if so, note that its end is left out."""
        is_growing = abs(time.time() - self.modified) < GROWING_S
        if is_growing:
            notes.remark(f"{self.path} is being written: what is not complete yet is left for the next time")
        return is_growing


@dataclass(frozen=True, kw_only=True)
class SourceRun:
    """One run of another tool."""

    kind: str
    key: str
    """What this run is, wherever its files lie."""
    columns: str = ""
    """What, besides more rows, can be different when the same run is exported again."""
    where: str
    """For people."""
    project: str | None = None
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    state: RunState = "finished"
    logs: Sequence[Log]
    """The oldest first."""


class Found(NamedTuple):
    """What there is at a path."""

    runs: list[SourceRun]
    damages: list[str]
    """Files that cannot be read at all."""
    left_alone: Sequence[str] = ()
    """What else lies there and was not asked for."""


def files_in(path: Path, damages: list[str]) -> list[Path]:
    """The file at a path, or those in a folder and below, in order. A folder that cannot be read is a damage."""

    def tell(error: OSError) -> None:
        damages.append(f"{error.filename} cannot be read: {error.strerror or error}")

    if path.is_file():
        return [path]
    below = (Path(folder, name) for folder, _, names in os.walk(path, onerror=tell) for name in names)
    return sorted(file for file in below if file.is_file())


def digest(*parts: str | bytes, length: int = 24) -> str:
    """A short name for what may be long."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "big") + data)
    return whole.hexdigest()[:length]


def as_step(value: object) -> int | None:
    """A step that a frame can have; None for any other."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP else None


def as_time(value: object, otherwise: float) -> float:
    """Seconds since 1970 that a frame can have."""
    good = isinstance(value, int | float) and math.isfinite(value) and 0 <= value < 2**53
    return float(value) if good else otherwise  # type: ignore[arg-type]
