"""What earlier scans have left of a run, so that a checkpoint which was overwritten since is told from a known one."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tsemon.errors import ServerRefused
from tsemon.transport import HttpDelivery, SpoolReader, find_spools
from tsemon.transport.folders import quoted
from tsemon.transport.recorded import patiently
from tsemon.wire import Frame

TIMEOUT_S = 60.0
CLOCK_S = 1e-3
"""Times of files that are nearer are the same."""
PRECISION = 1e-6
"""The service keeps float32."""
FORBIDDEN = 403


class Mark(NamedTuple):
    """By what a checkpoint is known again: when its file was written, and the norm of its parameters."""

    time: float
    norm: float | None

    @classmethod
    def of(cls, frame: Frame) -> Mark:
        return cls(frame.time, frame.scalars["total_param_norm"])

    def is_same(self, other: Mark) -> bool:
        own, others = (math.nan if mark.norm is None else mark.norm for mark in (self, other))
        has_same_norm = math.isclose(own, others, rel_tol=PRECISION) or not (
            math.isfinite(own) or math.isfinite(others)
        )
        return has_same_norm and abs(self.time - other.time) < CLOCK_S


@dataclass(frozen=True, slots=True)
class Attempt:
    """The newest at a run."""

    config: Mapping[str, Any]
    blocks: tuple[str, ...]
    num_attempts: int
    """With those before it."""
    num_stacks: int
    """Attempts of earlier versions have one: an array of activations had one input for all stacks."""


def num_stacks(run: Mapping[str, Any]) -> int:
    """The number of stacks of a run or a registration as JSON."""
    return len(run.get("stacks") or [run])


class Stored(ABC):
    """A run as it is now, in a service or in a spool folder."""

    may_have_been_sent = False
    """Whether what is not here any more may have gone to a service."""

    @abstractmethod
    def newest(self) -> Attempt | None:
        """None where there is none."""

    @abstractmethod
    def at(self, step: int) -> Mark | None:
        """The checkpoint that the run shows at this step."""

    @abstractmethod
    def hide_from(self, step: int) -> None:
        """A new attempt goes on from there."""

    @abstractmethod
    def close(self) -> None: ...


class Served(Stored):
    """Raises ServerUnreachable after `patience_s`. Where a token may not read, nothing is found, and that is told once."""

    def __init__(
        self, project: str, run: str, server: str, patience_s: float, on_warning: Callable[[str], None]
    ) -> None:
        self._names = project, run
        self._patience_s = patience_s
        self._on_warning = on_warning
        self._delivery = HttpDelivery(server, timeout_s=TIMEOUT_S)
        self._run_id: str | None = None
        self._may_read = True

    def newest(self) -> Attempt | None:
        found = patiently(lambda: self._delivery.find(*self._names), self._patience_s)
        if found is None:
            return None
        run_id = self._run_id = str(found["run_id"])
        run = patiently(lambda: self._delivery.run(run_id), self._patience_s)
        blocks = tuple(run.get("blocks") or ())
        return Attempt(run.get("config") or {}, blocks, int(run.get("attempt") or 0), num_stacks(run))

    def at(self, step: int) -> Mark | None:
        if (run_id := self._run_id) is None or not self._may_read:
            return None
        try:
            frame = patiently(lambda: self._delivery.frame(run_id, step), self._patience_s)
        except ServerRefused as refused:
            if refused.status != FORBIDDEN:
                raise
            self._may_read = False
            self._on_warning(
                f"{refused}; so nobody can tell whether checkpoints were overwritten since an earlier scan: of those, the "
                "run keeps what it has, whatever is shown here"
            )
            return None
        return None if frame is None else _mark(frame)

    def hide_from(self, step: int) -> None:
        """The service does."""

    def close(self) -> None:
        self._delivery.close()


class Spooled(Stored):
    """Reads the spools of the run at `newest`. Those that were synced are gone."""

    may_have_been_sent = True

    def __init__(self, project: str, run: str, root: Path) -> None:
        self._root, self._folder = root, root / quoted(project) / quoted(run)
        self._marks: dict[int, Mark] = {}

    def newest(self) -> Attempt | None:
        self._marks = {}
        newest: Attempt | None = None
        keys: list[str] = []
        for folder in find_spools(self._root):
            if folder.parent != self._folder:
                continue
            reader = SpoolReader(folder)
            body = reader.registration
            if body["attempt_key"] not in keys:
                keys.append(body["attempt_key"])
                self.hide_from(body.get("resume_step") or 0)
            for texts in reader.new_frames():
                for frame in map(json.loads, texts):
                    self._marks[frame["step"]] = _mark(frame)
            newest = Attempt(body.get("config") or {}, tuple(body.get("blocks") or ()), len(keys), num_stacks(body))
        return newest

    def at(self, step: int) -> Mark | None:
        return self._marks.get(step)

    def hide_from(self, step: int) -> None:
        self._marks = {other: mark for other, mark in self._marks.items() if other < step}

    def close(self) -> None:
        """Nothing is kept open."""


def _mark(frame: Mapping[str, Any]) -> Mark:
    """Of a frame as JSON has it: what is not finite is null or a word."""
    norm = frame["scalars"].get("total_param_norm")
    return Mark(frame["time"], norm if isinstance(norm, int | float) else None)
