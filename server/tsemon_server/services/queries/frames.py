"""One frame of a run, put together of what its writers sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tsemon.errors import UnknownFrame
from tsemon_answers.series import FrameQuery, RecordedFrame
from tsemon_server.filling import filled
from tsemon_server.services.queries.service import checked_detail
from tsemon_server.store import Store
from tsemon_server.store.reading import Reader
from tsemon_server.store.series.frames import PastFrame


def frame(store: Store, run_id: str, asked: FrameQuery) -> RecordedFrame:
    """The frame that is nearest to the step that was asked for, or the newest one. Raises UnknownFrame if there is none."""
    with store.read() as reader:
        return joined(nearest(reader, run_id, asked.step, asked.attempt))


def nearest(reader: Reader, run_id: str, step: int | None, attempt: int | None) -> Sequence[PastFrame]:
    """The frames of the step nearest to this one, or of the newest step. Raises UnknownFrame if the run has no frame."""
    checked_detail(reader, run_id, attempt)
    at = reader.frames.nearest(run_id, step, attempt)
    frames = [] if at is None else reader.frames.at(run_id, at)
    if not frames:
        which = "" if attempt is None else f" of attempt {attempt}"
        raise UnknownFrame(f"the run {run_id} has no frame{which} yet, or only rollups that retention has left of them")
    return frames


def joined(frames: Sequence[PastFrame]) -> RecordedFrame:
    """What several writers measured at one step; each fills what those before it left out."""
    first = frames[0]
    scalars: dict[str, float] = {}
    layers: dict[str, NDArray[np.floating[Any]]] = {}
    heads: dict[str, NDArray[np.floating[Any]]] = {}
    for one in frames:
        scalars = {**one.scalars, **scalars}
        layers, heads = filled(layers, one.layers), filled(heads, one.heads)
    return RecordedFrame(
        attempt=first.attempt,
        step=first.step,
        time=first.time,
        scalars={name: _finite(value) for name, value in sorted(scalars.items())},
        layers={name: [*map(_finite, values.tolist())] for name, values in sorted(layers.items())},
        heads={name: [[*map(_finite, row)] for row in rows.tolist()] for name, rows in sorted(heads.items())},
    )


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
