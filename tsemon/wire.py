"""What travels between a training process and the service: a frame, its arrays, and how they read as JSON.

A frame is all that was measured at one optimizer step. Arrays travel as base64 of little-endian float32, because at 48
layers x 20 metrics that is 3.5 times smaller and 3.7 times cheaper to read than lists of decimals. `docs/wire.md` is the
description for people who write a client in another language.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

API = "/api/v1"
"""The prefix of every REST route of this version."""

MAX_BODY_BYTES = 16 * 2**20
"""The largest body of frames that the service reads, and so the largest that a writer sends."""

PACKED = "application/vnd.tsemon.frames"
"""The content type of a packed body of frames."""
HISTORY = "history"
"""Entry of `accepts` of servers that take rows of scalars."""

PACKED_MAGIC = b"TSF1"
"""The first bytes of such a body."""

MAX_STEP = 2**53 - 1
"""The largest step and seq: the largest integer that every JSON reader keeps exact."""

MAX_FRAMES = 4096
"""Frames in one body: all of them are one transaction, which others wait for."""

MAX_SCALARS = 1000
"""Scalars in one frame, and arrays of each kind."""

MAX_ROWS = 4096
"""Rows of scalars in one body."""

MAX_METRICS = 10_000
"""Metrics of one run by different names, all its frames together."""

MAX_ATTEMPTS = 10_000
"""Attempts of one run."""

MAX_WRITERS = 4096
"""Writers of one attempt."""

MAX_CONFIG_BYTES = 2**20
"""A run's config as JSON in UTF-8."""

MAX_TAGS = 100
MAX_BLOCKS = 10_000
MAX_BLOCK_NAME = 256
"""Characters in the name of a block."""

MAX_STACKS = 32
"""Stacks of one run: rules look at each of them by itself."""

MAX_QUANTITIES = 100
"""Metrics of the user's own that a run describes."""

MAX_NOT_MEASURED = 200
"""Metrics of which one frame says why they are not measured."""
MAX_REASON = 300
"""Characters of such a reason."""

MAX_NAME = 128
NAME = rf"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{{1,{MAX_NAME}}}"
"""What a run, a project or a tag may be called: up to 128 characters on one line."""

METRIC_NAME = r"[A-Za-z_][A-Za-z0-9_./:-]{0,127}"
"""What a metric or a scalar of the user's own may be called."""

RunState = Literal["running", "finished", "failed"]
OnConflict = Literal["new", "take_over", "refuse"]
AlertState = Literal["pending", "firing", "acknowledged", "resolved"]

ASKED = "a person asked"
"""In a response to a training process, the rule of the pending alert that stands for a person's request for a zoom."""


class Array(NamedTuple):
    """Float32 values in row-major order. NaN and the infinities are values like any other.

    A tuple, because a server makes thousands of them a second, and a frozen dataclass takes three times as long.
    """

    shape: tuple[int, ...]
    data: bytes
    """The values, four bytes each, little-endian."""

    @classmethod
    def of(cls, values: Iterable[float], shape: Sequence[int] | None = None) -> Array:
        """Pack `values`; one axis unless `shape` says otherwise."""
        packed = array("f", values)
        if sys.byteorder == "big":
            packed.byteswap()
        shape = (len(packed),) if shape is None else tuple(shape)
        if math.prod(shape) != len(packed):
            raise ValueError(f"shape {shape} holds {math.prod(shape)} values, got {len(packed)}")
        return cls(shape, packed.tobytes())

    def tolist(self) -> list[float]:
        """All values in row-major order, flat."""
        unpacked = array("f")
        unpacked.frombytes(self.data)
        if sys.byteorder == "big":
            unpacked.byteswap()
        return unpacked.tolist()


@dataclass(frozen=True, slots=True)
class Frame:
    """All that one writer measured at one optimizer step. (run, attempt, writer, seq) is its identity."""

    seq: int
    """Position in the writer's stream, from 0, without gaps unless frames were dropped."""
    step: int
    """Optimizer steps done before the one that was measured: the first step of a run is 0."""
    time: float
    """When the frame was made, in seconds since 1970, UTC, by the writer's clock."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, Array] = field(default_factory=dict)
    """Per metric one value per block. Activations also have one for the input of each stack, before its blocks."""
    heads: Mapping[str, Array] = field(default_factory=dict)
    """Per metric an array of shape (blocks, heads)."""
    not_measured: Mapping[str, str] | None = None
    """Why metrics are not measured, by name: all of them, in the first frame and whenever that has changed; else None."""
    crc: int | None = field(default=None, compare=False)
    """The CRC-32 that its writer sent with the frame; None if none was sent. `to_json` computes it again."""

    def to_json(self) -> str:
        """The frame as one line of strict JSON (no NaN literal: see `number_to_json`), with the CRC-32 of its content."""
        return json.dumps(
            {
                "seq": self.seq,
                "step": self.step,
                "time": self.time,
                "scalars": {name: number_to_json(value) for name, value in self.scalars.items()},
                "layers": {name: array_to_json(values) for name, values in self.layers.items()},
                "heads": {name: array_to_json(values) for name, values in self.heads.items()},
                **({} if self.not_measured is None else {"not_measured": self.not_measured}),
                "crc": crc_of(self),
            },
            separators=(",", ":"),
            allow_nan=False,
        )


def crc_of(frame: Frame) -> int:
    """Compute the CRC-32 that travels and is stored with a frame. `docs/wire.md` lists the bytes that it covers."""
    scalars = sorted(frame.scalars.items())
    arrays = [(kind, *item) for kind in ("layers", "heads") for item in sorted(getattr(frame, kind).items())]
    crc = crc_of_names(
        [("scalars", name, 1, 1) for name, _ in scalars]
        + [(kind, name, math.prod(values.shape[:1]), math.prod(values.shape[1:])) for kind, name, values in arrays]
    )
    # JSON has one null for every bit pattern of a NaN.
    numbers = (math.nan if value != value else value for _, value in scalars)
    data = [struct.pack(f"<{len(scalars)}d", *numbers), *(values.data for _, _, values in arrays)]
    return zlib.crc32(b"".join(data), crc_of_place(frame.seq, frame.step, frame.time, crc))


def crc_of_names(metrics: Iterable[tuple[str, str, int, int]]) -> int:
    """The CRC-32 of a frame's metrics: kind, name, number of rows and number of columns of each metric, in order."""
    return zlib.crc32("".join(f"{kind} {name} {rows} {columns}\n" for kind, name, rows, columns in metrics).encode())


def crc_of_place(seq: int, step: int, time: float, crc: int) -> int:
    """Continue the CRC-32 `crc` with the place of a frame in its run."""
    return zlib.crc32(_PLACE.pack(seq, step, time), crc)


_PLACE = struct.Struct("<qqd")


class Rows(NamedTuple):
    """Scalars of steps without a sample: rows of the same names, and one stream of rows per writer beside its frames."""

    seq: int
    """Position of the first row in the writer's stream of rows, from 0, without gaps unless rows were dropped."""
    steps: Sequence[int]
    times: Sequence[float]
    """When each row was made, in seconds since 1970, UTC, by the writer's clock."""
    scalars: Mapping[str, Sequence[float]]
    """By name, a number per row."""

    def to_json(self) -> str:
        """The rows as a spool keeps them: one line of strict JSON, which `is_rows` tells from a frame."""
        columns = {name: list(map(number_to_json, values)) for name, values in self.scalars.items()}
        rows = {"seq": self.seq, "step": self.steps, "time": self.times, "scalars": columns}
        return f"{_ROWS}{json.dumps(rows, separators=(',', ':'), allow_nan=False)}}}"

    def frames(self) -> Iterator[Frame]:
        """Each row as a frame without layers."""
        for index, (step, time) in enumerate(zip(self.steps, self.times, strict=True)):
            yield Frame(self.seq + index, step, time, {name: column[index] for name, column in self.scalars.items()})


_ROWS = '{"history":'


def is_rows(text: str) -> bool:
    """Whether a spooled text is Rows, not a frame."""
    return text.startswith(_ROWS)


def weight_of(text: str) -> int:
    """Bytes that a spooled text counts for in a batch of at most 4 MiB, in which there are at most MAX_ROWS rows."""
    if not is_rows(text):
        return len(text) + 1
    num_rows = text.count(",", text.find("["), text.find("]")) + 1
    return max(len(text), num_rows * 2**10)


def parted(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split spooled texts into frames and rows. Rows lose their prefix."""
    frames: list[str] = []
    history: list[str] = []
    for text in texts:
        if is_rows(text):
            history.append(text[len(_ROWS) : -1])
        else:
            frames.append(text)
    return frames, history


def number_to_json(value: float) -> float | str | None:
    """A float as strict JSON can carry it: NaN is null, the infinities are "Infinity" and "-Infinity"."""
    if math.isfinite(value):
        return value
    return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def array_to_json(values: Array) -> dict[str, Any]:
    return {"shape": list(values.shape), "f32": base64.b64encode(values.data).decode("ascii")}


def frames_to_body(writer: str, attempt: int, texts: Iterable[str]) -> bytes:
    """The body of `POST /runs/{id}/frames` for frames and rows that are JSON already, as the spool keeps them."""
    head = json.dumps({"writer": writer, "attempt": attempt}, separators=(",", ":"))
    frames, history = parted(texts)
    tail = f',"history":[{",".join(history)}]' if history else ""
    return f'{head[:-1]},"frames":[{",".join(frames)}]{tail}}}'.encode()


@dataclass(frozen=True, slots=True)
class Alert:
    """What a rule has to say about a run, as the service sends it."""

    alert_id: str
    rule: str
    family: str
    severity: Literal["info", "warning", "critical"]
    state: AlertState
    pending_step: int
    firing_step: int | None
    resolved_step: int | None
    summary: str
    """One sentence for people."""
    evidence: Mapping[str, Any]
    """The layers, values, fit and window of samples that the rule saw."""
    advice: Mapping[str, str]
    """What to try (`text`) and where that comes from (`source`)."""
    incident_id: str | None = None
    """Incident that it belongs to; None before it fires, if it only informs, and with a server that has no incidents."""

    @property
    def is_active(self) -> bool:
        """Whether what it tells of goes on, be it that somebody knows already."""
        return self.state in ("firing", "acknowledged")

    @property
    def is_over(self) -> bool:
        return self.state == "resolved"

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Alert:
        """Read one alert; keys that this version does not know are left out."""
        return cls(**{name: obj[name] for name in cls.__slots__ if name != "incident_id" or name in obj})


_NEW = "where", "stack", "head"
"""Fields of an incident that older servers do not send."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One failure of a run, as the server sends it: alerts that belong together, and the likeliest cause."""

    incident_id: str
    family: str
    """Kind of failure of the likeliest cause."""
    severity: Literal["info", "warning", "critical"]
    """The worst of the alerts."""
    rule: str
    """Rule that saw the likeliest cause."""
    step: int
    """Step at which the first alert fired."""
    left_step: int
    """First sample that was not healthy for that rule."""
    blocks: Sequence[int] | None
    """First and last block in which that rule's condition was met, from 0; None if it has none."""
    state: Literal["open", "recovered", "ended"]
    summary: str
    """One sentence about the cause."""
    advice: Mapping[str, str]
    """Advice (`text`), and its source (`source`)."""
    is_settled: bool
    """False while another cause may turn out to be the likeliest."""
    where: str | None = None
    """The blocks in words, such as "blocks 0 to 3 of the decoder"; None if `blocks` is."""
    stack: str | None = None
    """Name of their stack; None if the model has a single stack or the rule is about all stacks."""
    head: int | None = None
    """Attention head that stands out in the first of these blocks, from 0, if the rule is about attention heads."""

    @property
    def is_active(self) -> bool:
        """True while it is open."""
        return self.state == "open"

    @property
    def is_over(self) -> bool:
        return self.state != "open"

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Incident:
        """Read one incident, without keys that this version does not know."""
        return cls(**{name: obj[name] for name in cls.__slots__ if name in obj or name not in _NEW})
