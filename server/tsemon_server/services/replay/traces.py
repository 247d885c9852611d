"""Recorded trainings in files of JSON lines, gzipped or not: a `run` line, a `loss` line, a line for each frame, an `end`.

`docs/replay.md` describes the format. A file is read line by line. What comes out is what the service would have been
sent: arrays in float32, and the losses of all steps since the last frame summed up in scalars.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import median_low
from typing import Annotated, Any, BinaryIO, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tsemon.catalogue import MOST_ABOVE_START, NOISE_ENDS_BEFORE, NUM_AT_START, NUM_OF_NOISE, NUM_RECENT, NUM_SEARCHED
from tsemon.errors import InvalidRecording
from tsemon.stacks import Stacks
from tsemon_server.rules.program import View
from tsemon_server.services.ingest.schemas import StackBody
from tsemon_server.services.replay.recording import Attempt

Number = float | None
"""null is NaN."""
Count = Annotated[int, Field(ge=0)]


class _Line(BaseModel):
    """Keys that are not known are left out: a header tells more than rules ask for."""

    model_config = ConfigDict(strict=True)


class _Run(_Line):
    """The first line."""

    t: Literal["run"]
    format: Literal["tsemon-trace/1"]
    name: str
    frozen_blocks: list[int] = []
    """Blocks that are not trained, on purpose; -1 is the embedding."""
    stacks: list[StackBody] | None = None
    """The stacks that the blocks form; absent, they are one."""


class _Loss(_Line):
    """The loss of every step from `first_step` on."""

    t: Literal["loss"]
    loss: list[Number]
    first_step: Count = 0

    def between(self, after: int, step: int) -> list[Number]:
        """The losses of the steps after `after`, `step` included."""
        return self.loss[max(0, after + 1 - self.first_step) : max(0, step + 1 - self.first_step)]

    def without_stand_ins(self) -> _Loss:
        """With None for the first losses if they are equal and not positive."""
        first = next(iter(_finite(self.loss)), 1.0)
        is_none = [loss is None or not math.isfinite(loss) or (loss == first and first <= 0) for loss in self.loss]
        num = sum(1 for _ in takewhile(bool, is_none))
        return self.model_copy(update={"loss": [None] * num + self.loss[num:]})


class _Frame(_Line):
    t: Literal["frame"]
    step: Count
    scalars: dict[str, Number] = {}
    layers: dict[str, list[Number]] = {}
    heads: dict[str, list[list[Number]]] = {}


class _End(_Line):
    """The last line: the training was recorded to its end."""

    t: Literal["end"]


_LINE: TypeAdapter[_Run | _Loss | _Frame | _End] = TypeAdapter(
    Annotated[_Run | _Loss | _Frame | _End, Field(discriminator="t")]
)


MAX_LINE_BYTES = 2**26
"""The losses of a few million steps stand in one line."""


class Trace:
    """One file. Raises InvalidRecording, which names file and line, and FileNotFoundError."""

    def __init__(self, path: Path) -> None:
        self.problems: list[str] = []
        self._path = path
        self._has_ended = False
        self._lines = self._numbered()
        number, first = next(self._lines, (1, None))
        if not isinstance(first, _Run):
            raise self._invalid(number, "expected a `run` line first, with format tsemon-trace/1 and a name")
        self.name = first.name
        self._frozen = frozenset(block for block in first.frozen_blocks if block >= 0)
        self._stacks = Stacks.of(0, [stack.model_dump() for stack in first.stacks]) if first.stacks else None

    def attempts(self, own: Collection[str] = ()) -> Iterator[Attempt]:
        yield Attempt(0, self._views(), lambda: self._has_ended)

    def _views(self) -> Iterator[View]:
        losses = known = _Loss(t="loss", loss=[])
        last_step = -1
        for number, line in self._lines:
            if isinstance(line, _Loss):
                losses, known = line, line.without_stand_ins()
            elif isinstance(line, _Frame):
                if line.step <= last_step:
                    raise self._invalid(number, f"expected a step after {last_step}, got {line.step}")
                since = losses.between(last_step, line.step)
                last_step = line.step
                last = known.between(line.step - NUM_OF_NOISE - NOISE_ENDS_BEFORE, line.step)
                first = known.between(-1, min(line.step, losses.first_step + NUM_SEARCHED - 1))
                yield self._view(number, line, loss_scalars(since, last, first))
            elif isinstance(line, _End):
                self._has_ended = True
                return
        if not self.problems:
            self.problems.append(f"{self._path} has no `end` line: it was read up to step {last_step}")

    def _view(self, number: int, frame: _Frame, losses: dict[str, float]) -> View:
        scalars = {name: math.nan if value is None else value for name, value in frame.scalars.items()}
        layers = {name: _array(values) for name, values in frame.layers.items()}
        try:
            heads = {name: _array(rows) for name, rows in frame.heads.items()}
        except ValueError:
            raise self._invalid(number, "expected as many heads in each block") from None
        return View(frame.step, scalars | losses, layers, heads, self._frozen, self._stacks)

    def _numbered(self) -> Iterator[tuple[int, _Run | _Loss | _Frame | _End]]:
        number = 0
        try:
            with _opened(self._path) as lines:
                while line := lines.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(line) > MAX_LINE_BYTES:
                        raise self._invalid(number, f"expected at most {MAX_LINE_BYTES:,} bytes in a line, got more")
                    yield number, self._parsed(number, line)
        except _Broken:
            self.problems.append(f"{self._path} breaks off in line {number}: what stands before it is read")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if not number:
                raise self._invalid(
                    1, f"expected JSON lines, gzipped or plain, got what cannot be read ({error})"
                ) from None
            self.problems.append(
                f"{self._path} breaks off after line {number} ({error}): what stands before it is read"
            )

    def _parsed(self, number: int, line: bytes) -> _Run | _Loss | _Frame | _End:
        try:
            return _LINE.validate_json(line)
        except ValidationError as error:
            if number > 1 and not line.endswith(b"\n"):
                raise _Broken from None
            raise self._invalid(number, _first_problem(error)) from None

    def _invalid(self, number: int, text: str) -> InvalidRecording:
        return InvalidRecording(f"{self._path}, line {number}: {text}")


class _Broken(Exception):
    """The last line is not whole."""


def _opened(path: Path) -> BinaryIO:
    """The lines of a file, whatever its name ends in."""
    with open(path, "rb") as file:
        is_gzipped = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path)) if is_gzipped else open(path, "rb")


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found", "model_attributes_type"):
        return 'expected "t" to be run, loss, frame or end'
    return f"{where}: {problem['msg']}" if where else problem["msg"]


def _array(values: Sequence[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what is too large for float32 is infinite, as on the wire
        return np.array(values, np.float32)


def loss_scalars(since: Sequence[Number], last: Sequence[Number], first: Sequence[Number]) -> dict[str, float]:
    """What `attach` sends of all losses since the last sample, of the last ones and the first; nothing if none is known."""
    finite = _finite(since)
    if not since:
        return {}
    recent, before = _finite(last[-NUM_RECENT:]), _finite(last[:-NOISE_ENDS_BEFORE][-NUM_OF_NOISE:])
    start = _finite(first[:NUM_SEARCHED])[:NUM_AT_START]
    return {
        "loss_mean": _mean(finite),
        "loss_min": min(finite, default=math.nan),
        "loss_max": max(finite, default=math.nan),
        "loss_std": _deviation(finite),
        "loss_nonfinite": float(len(since) - len(finite)),
        "loss_recent": _mean(recent),
        "loss_before": _mean(before) if len(before) >= NUM_OF_NOISE / 2 else math.nan,
        "loss_noise": _deviation(before) if len(before) >= NUM_OF_NOISE / 2 else math.nan,
        "loss_start": max(min(start[0], MOST_ABOVE_START * abs(median_low(start))), median_low(start))
        if len(start) >= NUM_AT_START / 2
        else math.nan,
    }


def _finite(losses: Sequence[Number]) -> list[float]:
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((value - mean) * (value - mean) for value in values) / len(values)) if values else math.nan
