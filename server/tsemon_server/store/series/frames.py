"""A stored frame, packed and unpacked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsemon.wire import Array, Frame
from tsemon_server.store.series.packing import KINDS, Kind, Layout, Values, unpack


class HotFrame(NamedTuple):
    """A frame in its row. Each engine gives them in this order."""

    attempt: int
    writer: str
    seq: int
    step: int
    time: float
    layout_id: int
    blob: bytes
    crcs: bytes | None


class Measured(NamedTuple):
    """The values of one writer at one step."""

    writer: str
    values: Values


class PastFrame(NamedTuple):
    """A frame as it is stored: what it measured, exactly, as arrays."""

    attempt: int
    writer: str
    seq: int
    step: int
    time: float
    scalars: Mapping[str, float]
    layers: Mapping[str, NDArray[np.floating[Any]]]
    """(layers,) each."""
    heads: Mapping[str, NDArray[np.floating[Any]]]
    """(blocks, heads) each."""

    def to_wire(self) -> Frame:
        """The frame as its writer sent it."""
        layers, heads = (
            {name: Array(values.shape, values.tobytes()) for name, values in arrays.items()}
            for arrays in (self.layers, self.heads)
        )
        return Frame(self.seq, self.step, self.time, self.scalars, layers, heads)


def unpacked(frame: HotFrame, layout: Layout, kinds: Collection[Kind] = KINDS) -> PastFrame:
    """A hot frame with its values; without any where it is damaged."""
    values = unpack(layout, frame.blob, kinds if layout.is_sound(frame) else ())
    scalars = {name: float(value) for name, value in values["scalars"].items()}
    return PastFrame(*frame[:5], scalars, values["layers"], values["heads"])


def measured(frame: PastFrame) -> Measured:
    """Its values, without its address."""
    scalars = {name: np.asarray(value) for name, value in frame.scalars.items()}
    return Measured(frame.writer, {"scalars": scalars, "layers": dict(frame.layers), "heads": dict(frame.heads)})
