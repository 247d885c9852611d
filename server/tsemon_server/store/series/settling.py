"""Packs hot frames that have settled into a segment: a few hundred of one writer, one chunk per metric and shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tsemon_server.store.series.cells import Floats
from tsemon_server.store.series.chunks import Frames, pack_chunk, pack_frames
from tsemon_server.store.series.frames import HotFrame
from tsemon_server.store.series.packing import Kind, Layout, item_type
from tsemon_server.store.streams import Standing, Stream

PAGE_SEQS = 512
"""Settled seqs in one page."""
PAGE_BYTES = PAGE_SEQS // 8


class Sizes(NamedTuple):
    """How many frames of one writer move, and how many stay."""

    segment: int = 512
    """Frames of one segment, where there are as many."""
    kept: int = 64
    """So many of the newest stay behind: late ones find their neighbours, and short runs are no chunks of nothing."""


class Segment(NamedTuple):
    """Settled frames, packed."""

    stream: Stream
    seqs: Sequence[int]
    row: dict[str, Any]
    chunks: list[dict[str, Any]]


def num_segments(stream: Stream, num_frames: int, standing: Standing | None, sizes: Sizes) -> int:
    """Into how many segments the hot frames of a stream can be packed; 0 for a deleted run."""
    if standing is None:
        return 0
    if standing.is_over or stream.attempt not in standing.attempts:
        return -(-num_frames // sizes.segment) if num_frames > 1 else 0
    return max(0, num_frames - sizes.kept) // sizes.segment


def packed(stream: Stream, frames: Iterable[HotFrame], layouts: Mapping[int, Layout]) -> Segment | None:
    """A segment of these frames; None where none is sound. A damaged frame stays in its row, for `check` to find."""
    frames = sorted((frame for frame in frames if layouts[frame.layout_id].is_sound(frame)), key=_by_step)
    if not frames:
        return None
    seqs, steps = [frame.seq for frame in frames], [frame.step for frame in frames]
    times = np.array([frame.time for frame in frames], "<f8")
    about = {
        **stream._asdict(),
        "num_frames": len(frames),
        "first_step": steps[0],
        "last_step": steps[-1],
        "frames": pack_frames(Frames(np.array(seqs, np.int64), np.array(steps, np.int64), times)),
    }
    return Segment(stream, seqs, about, list(_chunks(stream, frames, layouts)))


def _by_step(frame: HotFrame) -> tuple[int, int]:
    return frame.step, frame.seq


def _chunks(stream: Stream, frames: Sequence[HotFrame], layouts: Mapping[int, Layout]) -> Iterator[dict[str, Any]]:
    steps = np.array([frame.step for frame in frames], np.int64)
    parts: dict[tuple[Kind, str], int] = {}
    for kind, metric, num_rows, num_columns, which, values in columns_of(frames, layouts):
        part = parts[kind, metric] = parts.get((kind, metric), -1) + 1
        chunk = pack_chunk(kind, steps[which], values)
        shape = {"num_rows": num_rows, "num_columns": num_columns}
        yield {**stream._asdict(), "kind": kind, "metric": metric, "part": part, **shape, **chunk._asdict()}


class Column(NamedTuple):
    """One metric in one shape over some frames."""

    kind: Kind
    metric: str
    num_rows: int
    num_columns: int
    which: NDArray[np.intp]
    """Indexes of the frames, ascending."""
    values: Floats
    """(frames, rows * columns)"""


def columns_of(frames: Sequence[HotFrame], layouts: Mapping[int, Layout]) -> Iterator[Column]:
    """The values of sound frames, metric by metric."""
    pieces: dict[tuple[Kind, str, int, int], list[tuple[NDArray[np.intp], Floats]]] = {}
    by_layout = sorted(range(len(frames)), key=lambda index: (frames[index].layout_id, index))
    for layout_id, group in groupby(by_layout, key=lambda index: frames[index].layout_id):
        which = np.array(list(group), np.intp)
        blobs = np.frombuffer(b"".join(frames[index].blob for index in which), np.uint8)
        blobs = blobs.reshape(len(which), len(frames[which[0]].blob))
        for slot in layouts[layout_id].slots:
            if not slot.size_bytes:  # of a model without blocks
                continue
            data = np.ascontiguousarray(blobs[:, slot.offset_bytes : slot.offset_bytes + slot.size_bytes])
            values = data.view(item_type(slot.kind)).reshape(len(which), -1)
            key = (slot.kind, slot.metric, slot.num_rows, slot.num_columns)
            pieces.setdefault(key, []).append((which, values))
    for key, found in pieces.items():
        which = np.concatenate([piece[0] for piece in found])
        order = np.argsort(which)
        yield Column(*key, which[order], np.concatenate([piece[1] for piece in found])[order])


def seqs_of_page(page: int, marked: bytes) -> Iterator[int]:
    """The seqs that a page marks as settled, a bit each."""
    bits = int.from_bytes(marked, "little")
    return (page * PAGE_SEQS + bit for bit in range(PAGE_SEQS) if bits >> bit & 1)


def marked(page: bytes, seqs: Iterable[int]) -> bytes:
    """The page with these seqs of it marked, too."""
    bits = int.from_bytes(page, "little")
    for seq in seqs:
        bits |= 1 << (seq % PAGE_SEQS)
    return bits.to_bytes(PAGE_BYTES, "little")
