"""Reading a spool beside whoever writes or delivers it, without a trace: no lock is kept, no file is touched."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tsemon.errors import SpoolError
from tsemon.transport.spool import find_segments, parse_records, read_end_state, read_run
from tsemon.wire import RunState, is_rows


@dataclass(slots=True)
class _Tail:
    """How far one segment was read."""

    offset: int = 0
    """Where the next record starts."""
    size_bytes: int = 0
    """The file's size at that time; more than `offset` where the rest is no sound record."""
    inode: int = 0
    """Another one means another file: a full spool puts one with half of the frames in its place."""


class SpoolReader:
    """The frames of one spool as they come. What was delivered and deleted before it was read is not there.

    Raises SpoolError where `run.json` is damaged, and FileNotFoundError where there is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registration, self.writer, text = read_run(folder)
        try:
            self.created_at = float(json.loads(text)["created_at"])
        except (ValueError, TypeError, OverflowError) as error:
            raise SpoolError(f"{folder / 'run.json'} is damaged: created_at should be a time: {error}") from error
        self._tails: dict[int, _Tail] = {}
        self._is_living = True
        self._has_had_lock = False

    def is_living(self) -> bool:
        """Does the writer's process live? Ask before reading: what a dead one left is complete."""
        # A living writer's lock cannot be had, and a dead one's is had once only and for a moment: whoever wants to
        # deliver what it left shall not find it taken.
        if not self._has_had_lock:
            try:
                lock = os.open(self.folder / "lock", os.O_RDONLY)
            except OSError:  # gone with the folder, which a living writer makes again
                self._is_living = False
            else:
                self._has_had_lock = _is_free(lock)
                self._is_living = not self._has_had_lock
        return self._is_living

    def new_frames(self) -> Iterator[tuple[str, ...]]:
        """The frames that came since, in order, some at a time. Those given count as read when more are asked for.

        Frames that a full spool has kept are given once more when it thins out.
        """
        for texts in self.new_texts():
            if frames := tuple(text for text in texts if not is_rows(text)):
                yield frames

    def new_texts(self, max_texts: int = 256) -> Iterator[tuple[str, ...]]:
        """The same with the rows of scalars between them."""
        for number, size_bytes, inode in self._segments():
            tail = self._tails.setdefault(number, _Tail(inode=inode))
            if size_bytes == tail.size_bytes:  # asked first: some file systems change inodes for no reason
                continue
            if inode != tail.inode or size_bytes < tail.size_bytes:
                tail = self._tails[number] = _Tail(inode=inode)
            start, data = tail.offset, self._read(number, tail.offset)
            parsed = parse_records(data)
            while records := list(islice(parsed, max_texts)):
                yield tuple(text for text, _ in records)
                tail.offset = start + records[-1][1]
            tail.size_bytes = start + len(data)

    def damaged(self) -> list[Path]:
        """The segments with a torn or altered record, so far; what stands behind it cannot be read."""
        newest = max(self._tails, default=0)
        return [
            self._path(number)
            for number, tail in sorted(self._tails.items())
            # The newest record of a living writer is only not complete yet.
            if tail.offset < tail.size_bytes and (number < newest or not self._is_living)
        ]

    def has_frames(self) -> bool:
        """Was a frame ever appended? Until then the writer may learn from where its training goes on, and write it down."""
        has_frames = bool(self._segments()) or (self.folder / "acked.json").exists()
        with contextlib.suppress(FileNotFoundError):  # delivered just now
            self.registration, self.writer, _ = read_run(self.folder)
        return has_frames

    def end_state(self) -> RunState | None:
        """What the writer left its run in, where it did."""
        return read_end_state(self.folder)

    def is_there(self) -> bool:
        """Is the spool still there? The first thing that goes once all is delivered is `run.json`."""
        return (self.folder / "run.json").exists()

    def _segments(self) -> list[tuple[int, int, int]]:
        """Number, size and inode of each segment, oldest first."""
        found: list[tuple[int, int, int]] = []
        for number, path in find_segments(self.folder):
            with contextlib.suppress(FileNotFoundError):  # delivered just now
                status = path.stat()
                found.append((number, status.st_size, status.st_ino))
        return sorted(found)

    def _read(self, number: int, offset: int) -> bytes:
        try:
            with open(self._path(number), "rb") as file:
                file.seek(offset)
                return file.read()
        except FileNotFoundError:  # delivered just now
            return b""

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.seg"


def _is_free(lock: int) -> bool:
    """Can the lock be had? Lets it go at once, and closes it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: no writer could have begun there, so it is a copy
        return True
    finally:
        os.close(lock)
    return True
