"""The frames of a segment, without their values."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tsemon_server.store.series.chunks import DamagedChunk, Frames, unpack_frames
from tsemon_server.store.series.frames import HotFrame
from tsemon_server.store.streams import At, Span, Visible

log = logging.getLogger(__name__)


class SegmentKey(NamedTuple):
    """A segment that is visible in part or as a whole."""

    attempt: int
    writer: str
    number: int
    first_step: int
    last_step: int
    finest: str
    """samples, fine or coarse: what retention has left of its chunks."""
    span: Span
    """The intervals in which it is visible."""

    @property
    def reach(self) -> int:
        """The last step that may be visible."""
        return min(self.last_step, self.span.last_step)


class SegmentRows(Protocol):
    """The frames of a run without their values, as an engine reads them."""

    def segments(self, visible: Visible) -> Sequence[SegmentKey]:
        """Visible segments."""

    def frames(self, segments: Sequence[SegmentKey]) -> Sequence[tuple[bytes, int]]:
        """The packed lists of their frames, and how many each has."""

    def newest_hot(self, visible: Visible) -> HotFrame | None:
        """The newest hot frame by step, attempt, seq and writer."""

    def hot_around(self, visible: Visible, step: int) -> Sequence[At]:
        """The nearest hot frame up to `step`, and the nearest after it; of several attempts the last."""

    def hot_times(self, visible: Visible) -> Sequence[tuple[int, float]]:
        """Steps and times of all hot frames."""


def frames_of(rows: SegmentRows, run_id: str, segment: SegmentKey) -> Frames | None:
    """The frames of a segment; None, and a line in the log, where the list cannot be read."""
    ((packed, num_frames),) = rows.frames([segment])
    return unpacked(run_id, segment, packed, num_frames)


def unpacked(run_id: str, segment: SegmentKey, packed: bytes, num_frames: int) -> Frames | None:
    """The same of a list that was read before."""
    try:
        return unpack_frames(packed, num_frames)
    except DamagedChunk:
        log.error(
            "the list of frames of run %s, attempt %d, writer %s, segment %d is damaged; "
            "`tsemon admin check` lists them all",
            run_id, segment.attempt, segment.writer, segment.number,
        )  # fmt: skip
        return None
