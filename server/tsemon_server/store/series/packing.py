"""A frame as one blob, and where each metric lies in it.

The blob holds scalars as float64, then layers and heads as float32, each kind sorted by name, all little-endian. Frames
with the same metrics in the same shapes share one layout, whose id is a digest of it: every process that writes finds
the same id without asking.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsemon.wire import Frame

Kind = Literal["scalars", "layers", "heads"]
KINDS: tuple[Kind, ...] = ("scalars", "layers", "heads")
Values = dict[Kind, dict[str, NDArray[np.floating[Any]]]]
"""Arrays by kind and metric: scalars have no axis, layers one, heads two."""


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


def item_bytes(kind: Kind) -> int:
    """The size of one number in a blob."""
    return 8 if kind == "scalars" else 4


def item_type(kind: Kind) -> np.dtype[np.float64] | np.dtype[np.float32]:
    """How one number lies in a blob."""
    return np.dtype("<f8") if kind == "scalars" else np.dtype("<f4")


def pack(frame: Frame) -> tuple[tuple[Slot, ...], bytes]:
    """The layout of the frame and its values."""
    scalars, layers, heads = sorted(frame.scalars.items()), sorted(frame.layers.items()), sorted(frame.heads.items())
    slots = _slots(
        tuple(name for name, _ in scalars),
        tuple((name, values.shape) for name, values in layers),
        tuple((name, values.shape) for name, values in heads),
    )
    parts = [struct.pack(f"<{len(scalars)}d", *(value for _, value in scalars))]
    parts += [values.data for _, values in (*layers, *heads)]
    return slots, b"".join(parts)


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@lru_cache(maxsize=1024)
def _slots(scalars: tuple[str, ...], layers: Shapes, heads: Shapes) -> tuple[Slot, ...]:
    slots = [Slot("scalars", name, 8 * number, 1, 1) for number, name in enumerate(scalars)]
    offset_bytes = 8 * len(slots)
    groups: tuple[tuple[Kind, Shapes], ...] = (("layers", layers), ("heads", heads))
    for kind, shapes in groups:
        for name, (num_rows, *rest) in shapes:
            slots.append(Slot(kind, name, offset_bytes, num_rows, math.prod(rest)))
            offset_bytes += slots[-1].size_bytes
    return tuple(slots)


@lru_cache(maxsize=1024)
def layout_id(slots: tuple[Slot, ...]) -> int:
    """63 bits that are the same for the same layout."""
    digest = hashlib.sha256(json.dumps(slots).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def unpack(slots: Sequence[Slot], blob: bytes) -> Values:
    """The arrays of a blob."""
    found: Values = {"scalars": {}, "layers": {}, "heads": {}}
    for slot in slots:
        values: NDArray[np.floating[Any]] = np.frombuffer(
            blob, item_type(slot.kind), slot.num_rows * slot.num_columns, slot.offset_bytes
        )
        shape = {"scalars": (), "layers": (slot.num_rows,), "heads": (slot.num_rows, slot.num_columns)}[slot.kind]
        found[slot.kind][slot.metric] = values.reshape(shape)
    return found
