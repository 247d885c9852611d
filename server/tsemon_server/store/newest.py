"""What many runs measured last, layer by layer, in a few questions for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, and_, select, tuple_

from tsemon_server.store import schema
from tsemon_server.store.packing import Layout, Slot, unpack
from tsemon_server.store.replaying import Replay

Layers = Mapping[str, NDArray[np.floating[Any]]]


class FramesSeen(NamedTuple):
    """The same as before: nothing that charts of a run show has changed, but for what retention drops."""

    attempt: int
    num_frames: int


def frames_seen(connection: Connection, run_ids: Sequence[str]) -> dict[str, FramesSeen]:
    """Of those of these runs that are there."""
    c = schema.run.c
    rows = connection.execute(select(c.run_id, c.attempt, c.num_frames).where(c.run_id.in_(run_ids)))
    return {run_id: FramesSeen(attempt, num_frames) for run_id, attempt, num_frames in rows}


def newest_layers(connection: Connection, run_ids: Sequence[str]) -> dict[str, list[Layers]]:
    """The newest step of each of these runs, writer by writer. Runs without a frame, and damaged frames, are left out."""
    run, frame = schema.run.c, schema.frame.c
    rows = connection.execute(
        select(schema.frame)
        .join(
            schema.run,
            # A sum, so that no engine looks for the attempt in an index: that of steps leads to one frame.
            and_(run.run_id == frame.run_id, run.last_step == frame.step, run.last_attempt == frame.attempt + 0),
        )
        .where(run.run_id.in_(run_ids))
        .order_by(frame.run_id, frame.writer, frame.seq)
    ).all()
    layouts = _layouts(connection, {(row.run_id, row.layout_id) for row in rows})
    found: dict[str, list[Layers]] = {}
    for row in rows:
        layout = layouts.get((row.run_id, row.layout_id))
        if layout is not None and layout.is_sound(row):
            found.setdefault(row.run_id, []).append(unpack(layout, row.blob)["layers"])
    for run_id, step, attempt in _settled(connection, run_ids):
        found[run_id] = [past.layers for past in Replay(connection, run_id, [attempt], step, step)]
    return found


def _layouts(connection: Connection, wanted: set[tuple[str, int]]) -> dict[tuple[str, int], Layout]:
    if not wanted:
        return {}
    c = schema.layout.c
    rows = connection.execute(
        select(c.run_id, c.layout_id, c.kind, c.metric, c.offset_bytes, c.num_rows, c.num_columns).where(
            tuple_(c.run_id, c.layout_id).in_(sorted(wanted))
        )
    )
    found: dict[tuple[str, int], list[Slot]] = {}
    for run_id, layout_id, *slot in rows:
        found.setdefault((run_id, layout_id), []).append(Slot(*slot))
    return {key: Layout.of(slots) for key, slots in found.items()}


def _settled(connection: Connection, run_ids: Sequence[str]) -> list[tuple[str, int, int]]:
    """Runs of whose newest step something has settled, with that step and its attempt: one writer's frame stays where it
    is, those of others do not."""
    run, segment = schema.run.c, schema.segment.c
    rows = connection.execute(
        select(run.run_id, run.last_step, run.last_attempt)
        .join(
            schema.segment,
            and_(
                segment.run_id == run.run_id,
                segment.attempt == run.last_attempt,
                segment.last_step >= run.last_step,
                segment.first_step <= run.last_step,
            ),
        )
        .where(run.run_id.in_(run_ids))
        .distinct()
    )
    return [(run_id, step, attempt) for run_id, step, attempt in rows]
