"""Packed bodies of frames: a header, then the values as they are. `docs/wire.md` describes them byte by byte.

Every number of the header is held against the bytes that came before anything is made of them. Frames of the same metrics
share a layout, so a layout is checked once and not for each frame.
"""

# ruff: noqa: RUF012  # pydantic copies the defaults of its fields
from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, FailFast, Field, FiniteFloat, ValidationError
from pydantic_core import PydanticCustomError

from tsemon.errors import BodyTooLarge, InvalidFrame
from tsemon.stacks import Stacks
from tsemon.wire import (
    MAX_BODY_BYTES,
    MAX_FRAMES,
    MAX_NOT_MEASURED,
    MAX_SCALARS,
    PACKED,
    PACKED_MAGIC,
    Array,
    Frame,
    Rows,
)
from tsemon_server.bodies import WHOLE, Body
from tsemon_server.services.ingest.schemas import (
    Count,
    History,
    MetricName,
    NumberOfAttempt,
    Reason,
    WriterName,
    check_heads,
    check_layers,
    problem_of,
)

MAX_METRICS_IN_ALL = 2**18
"""Metrics of all frames of a body: each takes microseconds and more memory than it has bytes. JSON may have as many keys."""
MOST_METRICS_KEPT = 256
"""Maximum number of metrics of a layout that is remembered."""

_START = struct.Struct("<4sI")

Length = Annotated[int, Field(ge=0, le=MAX_BODY_BYTES), WHOLE]


def _once_each(names: list[str]) -> list[str]:
    if len({*names}) < len(names):
        raise PydanticCustomError("twice", "Each name should be there once")
    return names


class Layout(Body):
    """The metrics of a frame, in the order of its values."""

    scalars: Annotated[list[MetricName], Field(max_length=MAX_SCALARS), AfterValidator(_once_each)] = []
    """Names of the metrics with one number."""
    layers: Annotated[
        dict[MetricName, Annotated[list[Length], Field(max_length=1)]], Field(max_length=MAX_SCALARS)
    ] = {}
    """Metrics with a value per block, each with its shape: [layers]."""
    heads: Annotated[dict[MetricName, Annotated[list[Length], Field(max_length=2)]], Field(max_length=MAX_SCALARS)] = {}
    """Metrics with a value per head, each with its shape: [blocks, heads]."""

    @property
    def num_metrics(self) -> int:
        return len(self.scalars) + len(self.layers) + len(self.heads)

    @property
    def num_bytes(self) -> int:
        """Bytes that the values of a frame take."""
        return 8 * len(self.scalars) + 4 * sum(
            math.prod(shape) for shape in (*self.layers.values(), *self.heads.values())
        )


class PackedFrame(Body):
    """One frame without its values."""

    layout: Annotated[int, Field(ge=0), WHOLE]
    """Index of its layout."""
    seq: Count
    step: Count
    time: Annotated[FiniteFloat, Field(ge=0)]
    not_measured: Annotated[dict[MetricName, Reason], Field(max_length=MAX_NOT_MEASURED)] | None = None
    crc: Annotated[int, Field(ge=0, lt=2**32), WHOLE] | None = None


class Header(Body):
    """A packed body without its values."""

    writer: WriterName
    attempt: NumberOfAttempt
    layouts: Annotated[list[Layout], Field(max_length=MAX_FRAMES), FailFast()]
    frames: Annotated[list[PackedFrame], Field(max_length=MAX_FRAMES), FailFast()]
    history: History = []


@dataclass(frozen=True, slots=True)
class PackedFrames:
    """A packed body whose form is right."""

    header: Header
    values: bytes

    @property
    def writer(self) -> str:
        return self.header.writer

    @property
    def attempt(self) -> int:
        return self.header.attempt

    def to_frames(self, stacks: Stacks) -> list[Frame]:
        """Hold the frames against the stacks of the model. Raises InvalidFrame."""
        return list(self._frames([_plan_of(layout, stacks) for layout in self.header.layouts]))

    def to_rows(self) -> list[Rows]:
        return [sent.to_rows() for sent in self.header.history]

    def _frames(self, plans: list[_Plan]) -> Iterator[Frame]:
        offset = 0
        for sent in self.header.frames:
            plan = plans[sent.layout]
            if plan.problem is not None:
                raise InvalidFrame(f"frame seq {sent.seq}, {plan.problem}; nothing of this body is stored")
            numbers = plan.doubles.unpack_from(self.values, offset)
            offset += plan.doubles.size
            scalars = {
                name: value if value == value else math.nan for name, value in zip(plan.scalars, numbers, strict=True)
            }
            layers, offset = self._arrays(plan.layers, offset)
            heads, offset = self._arrays(plan.heads, offset)
            yield Frame(sent.seq, sent.step, sent.time, scalars, layers, heads, sent.not_measured, sent.crc)

    def _arrays(self, shapes: _Shapes, offset: int) -> tuple[dict[str, Array], int]:
        arrays = {}
        for name, shape, size_bytes in shapes:
            end = offset + size_bytes
            arrays[name] = Array(shape, self.values[offset:end])
            offset = end
        return arrays, offset


_Shapes = tuple[tuple[str, tuple[int, ...], int], ...]
"""Name, shape and size in bytes of each array."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to take apart the values of a frame."""

    scalars: tuple[str, ...]
    doubles: struct.Struct
    layers: _Shapes
    heads: _Shapes
    problem: str | None


def _plan_of(layout: Layout, stacks: Stacks) -> _Plan:
    make = _plan if layout.num_metrics <= MOST_METRICS_KEPT else _plan.__wrapped__
    return make(tuple(layout.scalars), _shapes(layout.layers), _shapes(layout.heads), stacks)


@lru_cache(maxsize=128)
def _plan(scalars: tuple[str, ...], layers: _Shapes, heads: _Shapes, stacks: Stacks) -> _Plan:
    """Remembered, because body after body has the same layouts."""
    return _Plan(scalars, struct.Struct(f"<{len(scalars)}d"), layers, heads, _problem(layers, heads, stacks))


def _shapes(shapes: dict[str, list[int]]) -> _Shapes:
    return tuple((name, tuple(shape), 4 * math.prod(shape)) for name, shape in shapes.items())


def _problem(layers: _Shapes, heads: _Shapes, stacks: Stacks) -> str | None:
    """The first shape that does not fit the model."""
    for kind, shapes in (("layers", layers), ("heads", heads)):
        for name, shape, _ in shapes:
            try:
                check_layers(name, shape, stacks) if kind == "layers" else check_heads(shape, stacks.num_blocks)
            except ValueError as error:
                return f"{kind} {name!r}: {error}"
    return None


def is_packed(content_type: str) -> bool:
    """True if this is the content type of packed bodies."""
    return content_type.partition(";")[0].strip().lower() == PACKED


def header_of(raw: bytes | bytearray) -> bytes:
    """The header, which is JSON, or InvalidFrame."""
    magic, num_bytes = _START.unpack_from(raw) if len(raw) >= _START.size else (b"", 0)
    if magic != PACKED_MAGIC:
        raise _wrong(f"expected {PACKED_MAGIC!r} and the length of the header at the start, got {bytes(raw[:8])!r}")
    if num_bytes > len(raw) - _START.size:
        raise _wrong(f"expected a header of {num_bytes} bytes, got {len(raw) - _START.size} bytes; send all of it")
    return bytes(memoryview(raw)[_START.size : _START.size + num_bytes])


def read_packed(raw: bytes | bytearray) -> PackedFrames:
    """The packed body, or InvalidFrame that names the frame, or BodyTooLarge."""
    text = header_of(raw)
    try:
        header = Header.model_validate_json(text)
    except ValidationError as error:
        raise problem_of(error, text) from None
    sizes = [layout.num_bytes for layout in header.layouts]
    num_bytes = num_metrics = 0
    for number, sent in enumerate(header.frames, start=1):
        if sent.layout >= len(sizes):
            place = f"frame seq {sent.seq} (number {number} in the body), layout"
            raise InvalidFrame(
                f"{place}: expected the index of one of the {len(sizes)} layouts, got {sent.layout}; "
                "nothing of this body is stored"
            )
        num_bytes += sizes[sent.layout]
        num_metrics += header.layouts[sent.layout].num_metrics
    values = bytes(memoryview(raw)[_START.size + len(text) :])
    if num_bytes != len(values):
        raise _wrong(f"expected {num_bytes} bytes of values behind the header, as the layouts say, got {len(values)}")
    if num_metrics > MAX_METRICS_IN_ALL:
        raise BodyTooLarge(
            f"expected at most {MAX_METRICS_IN_ALL} metrics in all frames of a body, got {num_metrics}; send less at a time"
        )
    return PackedFrames(header, values)


def _wrong(what: str) -> InvalidFrame:
    return InvalidFrame(f"packed body of frames: {what}; nothing of this body is stored")
