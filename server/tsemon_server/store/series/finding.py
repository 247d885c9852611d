"""Where and when frames are: the newest one, the one nearest to a step, and the times of steps. A few segments are read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tsemon_server.store.series.cells import Ints
from tsemon_server.store.series.exporting import FrameRows, PackedExport
from tsemon_server.store.series.frames import unpacked as unpacked_frame
from tsemon_server.store.series.packing import Kind
from tsemon_server.store.series.segments import frames_of, unpacked
from tsemon_server.store.streams import At, Newest, Span, Visible

_SEGMENTS_AT_A_TIME = 200
_SCALARS: tuple[Kind, ...] = ("scalars",)


def newest(rows: FrameRows, run_id: str, visible: Visible) -> Newest | None:
    """The newest visible frame by step, attempt, seq and writer."""
    hot = rows.newest_hot(visible)
    found = None if hot is None else (hot.step, hot.attempt, hot.seq, hot.writer)
    is_hot = True
    for segment in sorted(rows.segments(visible), key=lambda segment: -segment.reach):
        if found is not None and segment.reach < found[0]:
            break
        frames = frames_of(rows, run_id, segment)
        if frames is None or not len(seen := np.flatnonzero(_is_in(segment.span, frames.steps))):
            continue
        settled = (int(frames.steps[seen[-1]]), segment.attempt, int(frames.seqs[seen[-1]]), segment.writer)
        if found is None or settled > found:
            found, is_hot = settled, False
    if found is None:
        return None
    step, attempt, seq, writer = found
    if is_hot and hot is not None:
        layout = rows.layouts({hot.layout_id})[hot.layout_id]
        return Newest(*found, hot.time, unpacked_frame(hot, layout, _SCALARS).scalars)
    of_step = PackedExport(rows, run_id, [Span(attempt, step, step)], kinds=_SCALARS).frames()
    frame = next(frame for frame in of_step if (frame.writer, frame.seq) == (writer, seq))
    return Newest(*found, frame.time, frame.scalars)


def nearest(rows: FrameRows, run_id: str, visible: Visible, wanted: int) -> At | None:
    """The nearest frame to a step that has its samples still; of two the earlier one, of several attempts the last."""

    def rank(at: At) -> tuple[int, int, int]:
        return abs(at.step - wanted), at.step, -at.attempt

    found = min(rows.hot_around(visible, wanted), key=rank, default=None)
    segments = [segment for segment in rows.segments(visible) if segment.finest == "samples"]
    gaps = [max(segment.first_step - wanted, wanted - segment.reach, 0) for segment in segments]
    for gap, segment in sorted(zip(gaps, segments, strict=True)):
        if found is not None and gap > abs(found.step - wanted):
            break
        frames = frames_of(rows, run_id, segment)
        if frames is not None:
            steps = frames.steps[_is_in(segment.span, frames.steps)]
            place = int(np.searchsorted(steps, wanted))
            near = [At(int(step), segment.attempt) for step in steps[max(0, place - 1) : place + 1]]
            found = min(near if found is None else [found, *near], key=rank, default=None)
    return found


def seconds_at(rows: FrameRows, run_id: str, visible: Visible, steps: Ints) -> NDArray[np.float64]:
    """Seconds from the first visible frame to each of these steps, in a straight line between the frames around it."""
    hot = rows.hot_times(visible)
    known, times = [np.array([step for step, _ in hot], np.int64)], [np.array([time for _, time in hot], np.float64)]
    segments = sorted(rows.segments(visible), key=lambda segment: (segment.first_step, segment))
    if segments:
        firsts = np.array([segment.first_step for segment in segments], np.int64)
        reaches = np.array([segment.reach for segment in segments], np.int64)
        # Those that hold, or lie around, one of the steps, and the first.
        before = np.maximum(np.searchsorted(firsts, steps, side="right") - 1, 0)
        after = np.minimum(before + (reaches[before] < steps), len(segments) - 1)
        wanted = np.unique(np.concatenate([[0], before, after]))
        for start in range(0, len(wanted), _SEGMENTS_AT_A_TIME):
            some = [segments[index] for index in wanted[start : start + _SEGMENTS_AT_A_TIME]]
            for segment, packed in zip(some, rows.frames(some), strict=True):
                frames = unpacked(run_id, segment, *packed)
                if frames is not None:
                    is_visible = _is_in(segment.span, frames.steps)
                    known.append(frames.steps[is_visible])
                    times.append(frames.times[is_visible])
    all_steps, all_times = np.concatenate(known), np.concatenate(times)
    if not len(all_steps):
        return np.full(len(steps), np.nan)
    order = np.argsort(all_steps, kind="stable")
    all_steps, all_times = all_steps[order], all_times[order]
    seconds: NDArray[np.float64] = np.interp(steps, all_steps, all_times) - all_times[0]
    return seconds


def _is_in(span: Span, steps: Ints) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (steps >= span.first_step) & (steps <= span.last_step)
    return found
