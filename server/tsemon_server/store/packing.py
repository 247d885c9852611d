"""A frame as one blob, the place of each metric in it, and the checksums that reveal damage.

The blob holds scalars as float64, then layers and heads as float32, each kind sorted by name, all little-endian. Frames
with the same metrics in the same shapes share one layout, whose id is a digest of it: every process that writes finds
the same id without asking.

The checksums are one CRC-32, written down as it grows: before the blob (of names, shapes, seq, step and time), and after
each page of 512 bytes. The last one is the CRC-32 that the frame's writer sent. Two of them check the pages between them,
so a chart reads and checks the few bytes that it shows.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsemon.errors import InvalidFrame
from tsemon.wire import Frame, crc_of_names, crc_of_place

Kind = Literal["scalars", "layers", "heads"]

PAGE_BYTES = 512
CRC_BYTES = 4


class Slot(NamedTuple):
    """Where one metric lies in the blob."""

    kind: Kind
    metric: str
    offset_bytes: int
    num_rows: int
    """1 for a scalar, else the number of layers."""
    num_columns: int
    """The number of heads, 1 where there are none."""

    @property
    def size_bytes(self) -> int:
        return self.num_rows * self.num_columns * item_bytes(self.kind)


class Layout(NamedTuple):
    """The metrics of a frame, with the place of each in its blob."""

    slots: tuple[Slot, ...]
    """In the order of the blob."""
    size_bytes: int
    """Size of the blob."""
    crc: int
    """CRC-32 of names and shapes."""

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Layout:
        slots = tuple(sorted(slots, key=lambda slot: (_KINDS.index(slot.kind), slot.metric)))
        crc = crc_of_names((slot.kind, slot.metric, slot.num_rows, slot.num_columns) for slot in slots)
        return cls(slots, sum(slot.size_bytes for slot in slots), crc)

    def crcs_of(self, seq: int, step: int, time: float, blob: bytes) -> bytes:
        """The checksums of a frame."""
        crcs, view = [crc_of_place(seq, step, time, self.crc)], memoryview(blob)
        for start in range(0, len(blob), PAGE_BYTES):
            crcs.append(zlib.crc32(view[start : start + PAGE_BYTES], crcs[-1]))
        return struct.pack(f"<{len(crcs)}I", *crcs)

    def is_sound(self, row: Any) -> bool:
        """True if a row of the table `frame` is unchanged; for a row without checksums, if its size is right."""
        if len(row.blob) != self.size_bytes:
            return False
        return row.crcs is None or row.crcs == self.crcs_of(row.seq, row.step, row.time, row.blob)


def are_pages_sound(pages: Sequence[bytes], crcs: Sequence[bytes | None]) -> NDArray[np.bool_]:
    """Whether each of these parts of blobs, as many pages of each, is unchanged.

    `crcs` has the checksum before each part and those after each of its pages, or None for frames without checksums.
    """
    num_pages = -(-len(pages[0]) // PAGE_BYTES)
    if crcs[0] is None:
        return np.ones(len(pages), bool)
    if len(crcs[0]) != CRC_BYTES * (num_pages + 1):
        return np.zeros(len(pages), bool)
    stored = np.frombuffer(b"".join(crcs), "<u4").reshape(len(pages), -1)  # type: ignore[arg-type]
    found = np.fromiter(map(zlib.crc32, pages, stored[:, 0].tolist()), np.uint32, len(pages))
    is_sound: NDArray[np.bool_] = found == stored[:, -1]
    return is_sound


_KINDS: tuple[Kind, ...] = ("scalars", "layers", "heads")


def item_bytes(kind: Kind) -> int:
    """The size of one number in a blob."""
    return 8 if kind == "scalars" else 4


def item_type(kind: Kind) -> np.dtype[np.float64] | np.dtype[np.float32]:
    """How one number lies in a blob."""
    return np.dtype("<f8") if kind == "scalars" else np.dtype("<f4")


def pack(frame: Frame) -> tuple[Layout, bytes, bytes]:
    """The layout of the frame, its values and their checksums.

    Raises InvalidFrame if the values do not have the CRC-32 that the writer sent.
    """
    scalars, layers, heads = sorted(frame.scalars.items()), sorted(frame.layers.items()), sorted(frame.heads.items())
    layout = _layout(
        tuple(name for name, _ in scalars),
        tuple((name, values.shape) for name, values in layers),
        tuple((name, values.shape) for name, values in heads),
    )
    parts = [struct.pack(f"<{len(scalars)}d", *(value for _, value in scalars))]
    parts += [values.data for _, values in (*layers, *heads)]
    blob = b"".join(parts)
    crcs = layout.crcs_of(frame.seq, frame.step, frame.time, blob)
    crc = int.from_bytes(crcs[-CRC_BYTES:], "little")
    if frame.crc not in (None, crc):
        raise InvalidFrame(
            f"frame seq {frame.seq}: crc must be {crc}, the CRC-32 of its content, got {frame.crc}; the frame changed on "
            "its way, or its writer computes the CRC over different bytes; this body is not stored"
        )
    return layout, blob, crcs


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@lru_cache(maxsize=1024)
def _layout(scalars: tuple[str, ...], layers: Shapes, heads: Shapes) -> Layout:
    slots = [Slot("scalars", name, 8 * number, 1, 1) for number, name in enumerate(scalars)]
    offset_bytes = 8 * len(slots)
    groups: tuple[tuple[Kind, Shapes], ...] = (("layers", layers), ("heads", heads))
    for kind, shapes in groups:
        for name, (num_rows, *rest) in shapes:
            slots.append(Slot(kind, name, offset_bytes, num_rows, math.prod(rest)))
            offset_bytes += slots[-1].size_bytes
    return Layout.of(slots)


@lru_cache(maxsize=1024)
def layout_id(slots: tuple[Slot, ...]) -> int:
    """63 bits that are the same for the same layout."""
    digest = hashlib.sha256(json.dumps(slots).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def unpack(layout: Layout, blob: bytes) -> dict[Kind, dict[str, np.ndarray]]:
    """The arrays of a blob by kind and metric: scalars have no axis, layers one, heads two."""
    found: dict[Kind, dict[str, np.ndarray]] = {"scalars": {}, "layers": {}, "heads": {}}
    for slot in layout.slots:
        values = np.frombuffer(blob, item_type(slot.kind), slot.num_rows * slot.num_columns, slot.offset_bytes)
        shape = {"scalars": (), "layers": (slot.num_rows,), "heads": (slot.num_rows, slot.num_columns)}[slot.kind]
        found[slot.kind][slot.metric] = values.reshape(shape)
    return found
