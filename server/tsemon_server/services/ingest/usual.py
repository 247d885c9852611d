"""Bodies of frames in JSON as writers usually send them, read in one pass.

Pydantic takes twice as long, most of it for the 30 arrays of a frame. `schemas` reads every body that is wrong or only
written in an unusual way, so it alone decides which bodies are valid, and writes all errors.
"""

from __future__ import annotations

import math
import re
from binascii import a2b_base64
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from typing import Any

from pydantic_core import from_json

from tsemon.stacks import Stacks
from tsemon.wire import (
    MAX_FRAMES,
    MAX_NOT_MEASURED,
    MAX_REASON,
    MAX_ROWS,
    MAX_SCALARS,
    MAX_STEP,
    METRIC_NAME,
    Array,
    Frame,
    Rows,
)
from tsemon_answers.record import LARGEST
from tsemon_server.bodies import count
from tsemon_server.services.ingest.schemas import FramesBody, check_heads, check_layers, read_frames

MOST_ARRAYS_KEPT = 256
"""Maximum number of shapes in a body whose check is remembered."""

_BODY, _HISTORY = {"writer", "attempt", "frames"}, {"history"}
_ROWS = {"seq", "step", "time", "scalars"}
_FRAME = {"seq", "step", "time", "scalars", "layers", "heads", "not_measured", "crc"}
_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
_METRIC = re.compile(METRIC_NAME)
_SIGNED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_EXACT = 2**53
"""Integers below this are floats as they are."""


class _UnusualError(Exception):
    """The body is one for `schemas`."""


@dataclass(slots=True)
class _Shapes:
    """The shapes of one kind of array in a body."""

    known: dict[str, tuple[list[int], tuple[int, ...], int]] = field(default_factory=dict)
    """By metric: as it came, as a tuple, and the number of bytes of such an array."""

    @property
    def each(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((name, shape) for name, (_, shape, _) in self.known.items())


@dataclass(frozen=True, slots=True)
class UsualFrames:
    """A usual body of frames whose form is right."""

    raw: bytes | bytearray
    writer: str
    attempt: int
    frames: list[Frame]
    rows: list[Rows]
    layers: _Shapes
    heads: _Shapes

    def to_rows(self) -> list[Rows]:
        return self.rows

    def to_frames(self, stacks: Stacks) -> list[Frame]:
        """Hold the frames against the stacks of the model. Raises InvalidFrame."""
        is_small = len(self.layers.known) + len(self.heads.known) <= MOST_ARRAYS_KEPT
        fit = _fit if is_small else _fit.__wrapped__
        if fit(self.layers.each, self.heads.each, stacks):
            return self.frames
        return read_frames(self.raw).to_frames(stacks)  # which tells what is wrong


@lru_cache(maxsize=128)
def _fit(layers: Any, heads: Any, stacks: Stacks) -> bool:
    """Whether all shapes fit the model. Remembered, because body after body has the same."""
    try:
        for name, shape in layers:
            check_layers(name, shape, stacks)
        for _, shape in heads:
            check_heads(shape, stacks.num_blocks)
    except ValueError:
        return False
    return True


def read_json(raw: bytes | bytearray) -> UsualFrames | FramesBody:
    """The body of frames, or InvalidFrame that names the frame and the metric."""
    try:
        return _read_usual(raw, from_json(raw, allow_inf_nan=False))
    except (_UnusualError, ValueError, TypeError, LookupError, AttributeError):
        return read_frames(raw)


def _read_usual(raw: bytes | bytearray, sent: Any) -> UsualFrames:
    writer, attempt, frames, history = sent["writer"], sent["attempt"], sent["frames"], sent.get("history", [])
    _expect(sent.keys() - _HISTORY == _BODY and type(frames) is list and len(frames) <= MAX_FRAMES)
    _expect(_WRITER.fullmatch(writer) is not None and type(attempt) is int and 1 <= attempt <= LARGEST)
    layers, heads = _Shapes(), _Shapes()
    read = [_frame(one, layers, heads) for one in frames]
    rows = [_rows(one) for one in history]
    _expect(type(history) is list and sum(len(some.steps) for some in rows) <= MAX_ROWS)
    # A key that comes twice is checked twice by `schemas`, and here once. So a colon stands for a key, or is in a reason.
    num_in_reasons = sum(map(_num_colons, read))
    num_of_rows = sum(len(one) + len(one["scalars"]) for one in history)
    _expect(count(raw, b":") == len(sent) + sum(map(_num_keys, frames)) + num_of_rows + num_in_reasons)
    _expect(not num_in_reasons or b"\\" not in raw)  # which may spell a colon in another way
    return UsualFrames(raw, writer, attempt, read, rows, layers, heads)


def _frame(sent: dict[str, Any], layer_shapes: _Shapes, head_shapes: _Shapes) -> Frame:
    seq, step, time = sent["seq"], sent["step"], sent["time"]
    crc, not_measured = sent.get("crc"), sent.get("not_measured")
    _expect(sent.keys() <= _FRAME)
    _expect(type(seq) is int and 0 <= seq <= MAX_STEP and type(step) is int and 0 <= step <= MAX_STEP)
    _expect(type(time) is float and 0 <= time < math.inf)
    _expect(crc is None or (type(crc) is int and 0 <= crc < 2**32))
    _expect(not_measured is None or _is_usual_reasons(not_measured))
    scalars = _scalars(sent.get("scalars", {}))
    layers = _arrays(sent.get("layers", {}), layer_shapes)
    heads = _arrays(sent.get("heads", {}), head_shapes)
    return Frame(seq, step, time, scalars, layers, heads, not_measured, crc)


def _rows(sent: dict[str, Any]) -> Rows:
    seq, steps, times, scalars = sent["seq"], sent["step"], sent["time"], sent["scalars"]
    _expect(sent.keys() == _ROWS and type(seq) is int and 0 <= seq <= MAX_STEP)
    _expect(type(steps) is list and all(type(step) is int and 0 <= step <= MAX_STEP for step in steps))
    _expect(type(times) is list and all(type(time) is float and 0 <= time < math.inf for time in times))
    _expect(0 < len(steps) == len(times) and 0 < len(scalars) <= MAX_SCALARS)
    columns: dict[str, list[float]] = {}
    for name, values in scalars.items():
        _expect(_is_metric(name) and type(values) is list and len(values) == len(steps))
        columns[name] = [value if type(value) is float and isfinite(value) else _number(value) for value in values]
    return Rows(seq, steps, times, columns)


def _scalars(sent: dict[str, Any]) -> dict[str, float]:
    _expect(len(sent) <= MAX_SCALARS)
    scalars = {}
    for name, value in sent.items():
        _expect(_is_metric(name))
        scalars[name] = value if type(value) is float and isfinite(value) else _number(value)
    return scalars


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) is int and -_EXACT < value < _EXACT:
        return float(value)
    return _SIGNED[value]


def _arrays(sent: dict[str, Any], shapes: _Shapes) -> dict[str, Array]:
    _expect(len(sent) <= MAX_SCALARS)
    known, arrays = shapes.known, {}
    for name, value in sent.items():
        shape = value["shape"]
        found = known.get(name)
        if found is None:
            found = known[name] = _shape(name, shape)
        data = a2b_base64(value["f32"], strict_mode=True)
        _expect(len(value) == 2 and shape == found[0] and len(data) == found[2])
        arrays[name] = Array(found[1], data)
    return arrays


def _shape(name: str, sent: list[int]) -> tuple[list[int], tuple[int, ...], int]:
    # With lengths above 1, any list that is equal has the same integers: true is equal to 1.
    _expect(_is_metric(name) and type(sent) is list and len(sent) <= 2)
    _expect(all(type(length) is int and length > 1 for length in sent))
    return sent, tuple(sent), 4 * math.prod(sent)


def _is_usual_reasons(sent: dict[str, Any]) -> bool:
    return len(sent) <= MAX_NOT_MEASURED and all(
        _is_metric(name) and type(why) is str and len(why) <= MAX_REASON for name, why in sent.items()
    )


@lru_cache(maxsize=4096)
def _is_metric(name: str) -> bool:
    return _METRIC.fullmatch(name) is not None


def _num_keys(sent: dict[str, Any]) -> int:
    arrays = (len(sent.get(kind, ())) for kind in ("layers", "heads"))
    return len(sent) + len(sent.get("scalars", ())) + 3 * sum(arrays) + len(sent.get("not_measured") or ())


def _num_colons(frame: Frame) -> int:
    return sum(why.count(":") for why in (frame.not_measured or {}).values())


def _expect(is_usual: bool) -> None:
    if not is_usual:
        raise _UnusualError
