"""Frames that wait in memory, for want of a folder that can be written."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

from tsemon.errors import SpoolError
from tsemon.transport.spool import Batch, Position
from tsemon.wire import RunState, weight_of


class MemorySpool:
    """Does what Spool does, method by method, for as long as the process lives.

    When it is full the oldest unsent frames go, counted.
    """

    folder = None

    def __init__(
        self, registration: Mapping[str, Any], writer: str, *, max_frames: int = 10_000, max_bytes: int = 64 * 2**20
    ) -> None:
        self.registration = dict(registration)
        self.writer = writer
        self.num_dropped = 0
        self.num_damaged = 0
        self.end_state: RunState | None = None
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._mutex = threading.Lock()
        self._frames: deque[str] = deque()
        self._size_bytes = 0
        self._num_gone = 0
        """Frames acknowledged or dropped: the position of the oldest that is kept."""

    @property
    def num_unsent(self) -> int:
        return len(self._frames)

    @property
    def has_frames(self) -> bool:
        return bool(self._frames or self._num_gone)

    @property
    def is_drained(self) -> bool:
        return not self._frames

    def resume_at(self, step: int) -> None:
        assert not self.has_frames
        self.registration.update(resume_step=step, attempt_key=uuid.uuid4().hex)

    def append(self, payload: str) -> None:
        with self._mutex:
            self._frames.append(payload)
            self._size_bytes += len(payload)
            while len(self._frames) > self._max_frames or (
                self._size_bytes > self._max_bytes and len(self._frames) > 1
            ):
                self._forget_oldest()
                self.num_dropped += 1

    def next_batch(self, max_frames: int = 256, max_bytes: int = 4 * 2**20) -> Batch | None:
        frames: list[str] = []
        size_bytes = 0
        with self._mutex:
            for frame in islice(self._frames, max_frames):
                size_bytes += weight_of(frame)
                if frames and size_bytes > max_bytes:
                    break
                frames.append(frame)
            first = self._num_gone + 1
        ends = tuple(Position(0, 0, index) for index in range(first, first + len(frames)))
        return Batch(tuple(frames), ends) if frames else None

    def acknowledge(self, position: Position) -> None:
        with self._mutex:
            while self._frames and self._num_gone < position.num_before:
                self._forget_oldest()

    def set_aside(self, payload: str, reason: str) -> None:
        """Raises SpoolError: what is refused is lost."""
        raise SpoolError(f"there is no folder to keep a refused frame of {len(payload)} bytes in ({reason})")

    def finish(self, state: RunState) -> None:
        self.end_state = state

    def close(self) -> None:
        """Nothing is held."""

    def discard(self) -> None:
        """Nothing is left behind."""

    def _forget_oldest(self) -> None:
        self._size_bytes -= len(self._frames.popleft())
        self._num_gone += 1
