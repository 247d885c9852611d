"""Frames on disk until the service has confirmed them.

One folder per writing process, `<root>/<project>/<run>/<attempt key>~<writer>/`:

    run.json       the body of `POST /runs` and, besides, `writer` and `created_at`; as it is once there is a frame
    00000001.seg   records, oldest first: u32 length, u32 CRC-32 (both little-endian), then one frame as JSON text. If bit 31
                   of the length is set, the text is compressed (zlib); both numbers are those of the compressed bytes
    acked.json     up to where the service has confirmed, replaced atomically
    refused.jsonl  frames that the service will not take, with its reason
    end.json       the state that the writer left the run in; a writer that died leaves none
    lock           held (flock) for as long as the writer lives

A record reaches the operating system before `append` returns, so a killed process loses none. It is forced to the
device when a segment is full and at `close`: a power cut may cost the records after that. If somebody deletes the folder
while it is written, the next write makes it again, and the frames that went with it are counted.

A full spool is thinned out: a segment is replaced by one with half of its frames, one segment at a time, so that the frames
that are left cover the whole run evenly. Segments that the sender has in hand are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import threading
import time
import uuid
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tsemon.errors import InvalidArgument, SpoolError, SpoolInUse
from tsemon.transport.folders import after_siblings, quoted
from tsemon.transport.thinning import Thinning
from tsemon.wire import MAX_BODY_BYTES, RunState, weight_of

_RECORD = struct.Struct("<II")
_COMPRESSED = 1 << 31
"""In the length of a record."""


class Position(NamedTuple):
    """A place between two frames; positions of one spool compare in the order of its frames."""

    segment: int
    offset: int
    num_before: int
    """Frames of this segment before the place."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Frames to send together. `ends[i]` is the position to acknowledge once frames 0 to i have arrived."""

    frames: tuple[str, ...]
    ends: tuple[Position, ...]

    def halves(self) -> tuple[Batch, Batch]:
        """The batch in two, in order; needs two frames."""
        middle = len(self.frames) // 2
        return Batch(self.frames[:middle], self.ends[:middle]), Batch(self.frames[middle:], self.ends[middle:])


@dataclass(slots=True)
class _Segment:
    size_bytes: int
    num_frames: int
    num_lost: int = 0
    """Frames that went with the deleted file, and are not in `num_frames` any more."""
    num_thinned: int = 0
    """Number of times that this process has thinned it out."""
    is_final: bool = False
    """True if none of its frames may go. It is not read again for nothing."""


def parse_records(data: bytes) -> Iterator[tuple[str, int]]:
    """Each sound record at the start of `data` with the offset at which it ends; stops at the first unsound one."""
    offset = 0
    while len(data) - offset >= _RECORD.size:
        length, crc = _RECORD.unpack_from(data, offset)
        is_compressed, length = length >= _COMPRESSED, length & ~_COMPRESSED
        payload = data[offset + _RECORD.size : offset + _RECORD.size + length]
        # A file that a power cut filled up with zeros reads as empty records with the right CRC; no frame is empty.
        if not length or len(payload) < length or zlib.crc32(payload) != crc:
            return
        try:
            text = (_decompressed(payload) if is_compressed else payload).decode()
        except (zlib.error, UnicodeDecodeError):
            return
        offset += _RECORD.size + length
        yield text, offset


def make_record(payload: str) -> bytes:
    """One frame as `parse_records` reads it."""
    data, flag = payload.encode(), 0
    if len(data) <= MAX_BODY_BYTES:
        # The fastest level: the default one takes a quarter longer for 2 % less.
        compressed = zlib.compress(data, 1)
        if len(compressed) < len(data):
            data, flag = compressed, _COMPRESSED
    return _RECORD.pack(len(data) | flag, zlib.crc32(data)) + data


def _decompressed(data: bytes) -> bytes:
    """Raises zlib.error unless `data` is one whole stream that is no longer than a body may be."""
    stream = zlib.decompressobj()
    text = stream.decompress(data, MAX_BODY_BYTES)
    if not stream.eof or stream.unused_data:
        raise zlib.error("not one whole stream of at most 16 MiB")
    return text


class Spool:
    """The frames of one writer. All methods may be called from any thread of the process that opened it."""

    def __init__(self, folder: Path, lock: int, max_bytes: int, segment_bytes: int) -> None:
        self.folder = folder
        self.registration: dict[str, Any]
        self.writer: str
        self.registration, self.writer, self._run_json = read_run(folder)
        self.has_frames = False
        """Was a frame ever appended?"""
        self.num_dropped = 0
        """Frames that were deleted unsent, because the spool was full or someone removed its files."""
        self.num_damaged = 0
        """Segments with a torn or altered record; what stood behind it is lost."""
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max_bytes // 4)
        self._mutex = threading.RLock()
        self._lock: int | None = lock
        self._fd: int | None = None
        self._acked = Position(1, 0, 0)
        self._in_hand = 0
        """The last segment of the newest batch, whose positions may be acknowledged at any time."""
        self._thinnings: defaultdict[int, Thinning] = defaultdict(Thinning)
        """By the number of times that a segment was thinned out before. Each goes over all segments once, oldest first."""
        self._segments: dict[int, _Segment] = {}
        self._recover()
        _held.add(self)

    @classmethod
    def create(
        cls,
        root: Path | str,
        registration: Mapping[str, Any],
        writer: str,
        *,
        max_bytes: int = 2**30,
        segment_bytes: int = 2**20,
    ) -> Spool:
        """Start the spool of one writing process.

        `registration` is the body of `POST /runs` with its `attempt_key`. The pair of attempt key and writer must be
        new: a second process under the same pair would number its frames like the first. When the unsent frames take
        `max_bytes`, they are thinned out.
        """
        if not isinstance(registration.get("attempt_key"), str):
            raise InvalidArgument(
                f"registration needs an attempt_key (text), got {registration.get('attempt_key')!r}: without it, "
                "sending the registration again would start another attempt"
            )
        try:
            json.dumps({**registration, "writer": writer}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"project, run, config, tags and blocks must be plain JSON: {error}") from error
        key = f"{quoted(registration['attempt_key'])}~{quoted(writer)}"
        folder = Path(root) / quoted(registration["project"]) / quoted(registration["run"]) / key
        with _telling("make", folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            created_at = after_siblings(folder, time.time())
            run_json = json.dumps({**registration, "writer": writer, "created_at": created_at})
            folder.mkdir()
            lock = _lock(folder)
            try:
                _replace(folder / "run.json", run_json)
                return cls(folder, lock, max_bytes, segment_bytes)
            except BaseException:
                os.close(lock)
                raise

    @classmethod
    def open(cls, folder: Path | str, *, max_bytes: int = 2**30, segment_bytes: int = 2**20) -> Spool:
        """Take over a spool that an earlier process left. Raises SpoolInUse while its writer lives."""
        folder = Path(folder)
        with _telling("open", folder):
            lock = _lock(folder)
            try:
                return cls(folder, lock, max_bytes, segment_bytes)
            except BaseException:
                os.close(lock)
                raise

    @property
    def num_unsent(self) -> int:
        """Frames that the service has not confirmed."""
        # Without the mutex, which the exporter may hold for as long as a slow disk takes.
        kept = sum(segment.num_frames for segment in list(self._segments.values()))
        return max(0, kept - self._acked.num_before)

    @property
    def is_drained(self) -> bool:
        """Has the service confirmed every frame?"""
        return self.num_unsent == 0

    @property
    def end_state(self) -> RunState | None:
        """What `finish` was told; None for a writer that died before."""
        return read_end_state(self.folder)

    def resume_at(self, step: int) -> None:
        """Say, before the first frame, that the training goes on from `step`. That is another attempt.

        Raises SpoolError when that cannot be written down; this process registers it all the same.
        """
        with self._mutex, _telling("write to", self.folder):
            assert not self.has_frames
            self.registration.update(resume_step=step, attempt_key=uuid.uuid4().hex, on_conflict="take_over")
            self._run_json = json.dumps(json.loads(self._run_json) | self.registration)
            _replace(self.folder / "run.json", self._run_json)

    def append(self, payload: str) -> None:
        """Keep one frame. Raises SpoolError, and has not kept it, when the folder or the disk does not take it."""
        record = make_record(payload)
        with self._mutex, _telling("write to", self.folder):
            self._make_again()
            current = self._writable_segment(len(record))
            assert self._fd is not None
            try:
                _write_all(self._fd, record)
            except OSError:
                # Half a record would hide those behind it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, current.size_bytes)
                self._end_segment()
                if not current.num_frames:
                    self._delete_segment(max(self._segments))
                raise
            current.size_bytes += len(record)
            current.num_frames += 1
            self.has_frames = True

    def next_batch(self, max_frames: int = 256, max_bytes: int = 4 * 2**20) -> Batch | None:
        """The oldest unsent frames within both limits, but at least one; None when there are none."""
        frames: list[str] = []
        ends: list[Position] = []
        size_bytes = 0
        with self._mutex:
            for number in sorted(self._segments):
                _, offset, index = self._acked if number == self._acked.segment else (number, 0, 0)
                for text, end in parse_records(self._read_segment(number, offset)):
                    size_bytes += weight_of(text)
                    if frames and (len(frames) == max_frames or size_bytes > max_bytes):
                        return Batch(tuple(frames), tuple(ends))
                    self._in_hand = number
                    index += 1
                    frames.append(text)
                    ends.append(Position(number, offset + end, index))
        return Batch(tuple(frames), tuple(ends)) if frames else None

    def acknowledge(self, position: Position) -> None:
        """The service has all frames up to `position`. Segments that are wholly acknowledged are deleted.

        Raises SpoolError when that cannot be written down; this process goes on from `position` all the same, and the
        next one sends some frames again.
        """
        with self._mutex, _telling("write to", self.folder):
            if position > self._acked:
                self._recount_lost(position)
                self._move_acked(position)

    def set_aside(self, payload: str, reason: str) -> None:
        """Keep a frame that the service will not take in `refused.jsonl`."""
        line = json.dumps({"reason": reason, "frame": payload}) + "\n"
        with self._mutex, _telling("write to", self.folder):
            self._make_again()
            with open(self.folder / "refused.jsonl", "a", encoding="utf-8") as file:
                file.write(line)

    def finish(self, state: RunState) -> None:
        """Write down how the run ended."""
        with self._mutex, _telling("write to", self.folder):
            self._make_again()
            _replace(self.folder / "end.json", json.dumps({"state": state}))

    def close(self) -> None:
        """Force the frames to the device and let the spool go; what is unsent stays for the next process."""
        with self._mutex, _telling("close", self.folder):
            try:
                self._end_segment()
            finally:
                self._release()

    def discard(self) -> None:
        """Delete the spool, all of which has been delivered. Only refused frames stay, beside `delivered.json`."""
        with self._mutex, _telling("delete", self.folder):
            try:
                if self._fd is not None:
                    os.close(self._fd)
                    self._fd = None
                has_refused = (self.folder / "refused.jsonl").exists()
                if has_refused:
                    os.replace(self.folder / "run.json", self.folder / "delivered.json")
                for name in ("run.json", "acked.json", "end.json", *map(_segment_name, self._segments), "lock"):
                    (self.folder / name).unlink(missing_ok=True)
                if not has_refused:
                    self.folder.rmdir()
            finally:
                self._release()

    # -- below: called with the mutex held, or before anyone else knows the spool

    def _recover(self) -> None:
        # Without it, or where it was lost in a power cut, all is sent again: the service knows what it has.
        self._acked, self.num_dropped = _read_acked(self.folder) or (Position(1, 0, 0), 0)
        for number, path in sorted(find_segments(self.folder)):
            with contextlib.suppress(OSError):  # a process was killed while it thinned this segment out
                _thinned(path).unlink()
            if number < self._acked.segment:
                path.unlink()
                continue
            data = path.read_bytes()
            ends = [0, *(end for _, end in parse_records(data))]
            self.num_damaged += ends[-1] != len(data)
            self._segments[number] = _Segment(len(data), len(ends) - 1)
            if number == self._acked.segment and ends[self._acked.num_before :][:1] != [self._acked.offset]:
                # Either a power cut has taken what was acknowledged, or nobody knows what was.
                is_cut = self._acked.num_before >= len(ends)
                self._acked = Position(number + is_cut, 0, 0)
        self.has_frames = bool(self._segments) or self._acked > Position(1, 0, 0)
        if self._acked.segment not in self._segments:
            self._acked = Position(self._acked.segment, 0, 0)
        for number in [number for number in self._segments if number < self._acked.segment]:
            self._delete_segment(number)

    def _make_again(self) -> None:
        """Make the folder again where someone has deleted it: its lock is gone then."""
        if self._lock is None or os.fstat(self._lock).st_nlink:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(self.folder)
        try:
            _replace(self.folder / "run.json", self._run_json)
        except OSError:
            os.close(lock)
            raise
        os.close(self._lock)
        self._lock = lock
        for number in self._segments:
            if not (self.folder / _segment_name(number)).exists():
                self._count_lost(number)

    def _count_lost(self, number: int) -> None:
        segment = self._segments[number]
        num_acked = self._acked.num_before if number == self._acked.segment else 0
        segment.num_lost += segment.num_frames - num_acked
        self.num_dropped += segment.num_frames - num_acked
        segment.num_frames, segment.size_bytes = num_acked, 0

    def _recount_lost(self, position: Position) -> None:
        """Frames that were on their way when their file was deleted, and have arrived, are not lost."""
        last = self._segments.get(position.segment)
        if last is not None and last.num_lost:
            before = (s.num_lost for number, s in self._segments.items() if number < position.segment)
            self.num_dropped -= position.num_before - last.num_frames + sum(before)

    def _writable_segment(self, record_bytes: int) -> _Segment:
        if self._lock is None:
            raise OSError(None, "it is closed")
        if self._fd is not None and os.fstat(self._fd).st_nlink == 0:
            # Writing to a deleted file succeeds, and helps nobody.
            self._end_segment()
        if self._fd is not None:
            current = self._segments[max(self._segments)]
            if current.size_bytes + record_bytes <= self._segment_bytes:
                return current
            self._end_segment()
        self._make_room(max(record_bytes, self._segment_bytes))
        # Always a new file, never the torn tail of an old one.
        number = max(max(self._segments, default=0) + 1, self._acked.segment)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._fd = os.open(self.folder / _segment_name(number), flags, 0o644)
        self._segments[number] = _Segment(0, 0)
        return self._segments[number]

    def _end_segment(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _make_room(self, num_bytes: int) -> None:
        """Make room for a segment of this size; no segment is open. Frames go by halves, and whole segments at the last."""
        while self._segments and sum(s.size_bytes for s in self._segments.values()) + num_bytes > self._max_bytes:
            with contextlib.suppress(OSError, SpoolError):  # no room for half of a segment beside the whole, say
                if self._thin_out():
                    continue
            oldest = min(self._segments)
            num_acked = self._acked.num_before if oldest == self._acked.segment else 0
            self.num_dropped += self._segments[oldest].num_frames - num_acked
            with contextlib.suppress(OSError):  # not written down: the next process then finds fewer segments, no more
                self._move_acked(Position(oldest + 1, 0, 0))

    def _thin_out(self) -> bool:
        """Drop half of the frames of the oldest of the segments that have been thinned least. False if none has two."""
        in_hand = max(self._in_hand, self._acked.segment if self._acked.num_before else 0)
        others = [number for number, segment in self._segments.items() if number > in_hand and not segment.is_final]
        for number in sorted(others, key=lambda number: (self._segments[number].num_thinned, number)):
            if self._thin(number):
                with contextlib.suppress(OSError):
                    self._move_acked(self._acked)  # for `num_dropped`
                return True
        return False

    def _thin(self, number: int) -> bool:
        segment = self._segments[number]
        size_bytes, data = segment.size_bytes, self._read_segment(number, 0)
        thinning, kept, start = self._thinnings[segment.num_thinned], list[bytes](), 0
        num_before = thinning.num_that_may_go
        for text, end in parse_records(data):
            if thinning.keeps(text):
                kept.append(data[start:end])
            start = end
        segment.num_thinned += 1
        segment.is_final = thinning.num_that_may_go == num_before
        if len(kept) < segment.num_frames:
            self._replace_segment(number, kept)
        return segment.size_bytes < size_bytes

    def _replace_segment(self, number: int, records: list[bytes]) -> None:
        segment, path = self._segments[number], self.folder / _segment_name(number)
        # Through a file of its own: after a crash there are all of the frames or the half, and so for a reader beside us.
        try:
            with open(_thinned(path), "wb") as file:
                file.write(b"".join(records))
                file.flush()
                os.fsync(file.fileno())
            os.replace(_thinned(path), path)
        except OSError:
            with contextlib.suppress(OSError):
                _thinned(path).unlink()
            raise
        self.num_dropped += segment.num_frames - len(records)
        segment.num_frames, segment.size_bytes = len(records), sum(map(len, records))
        if not records:
            self._delete_segment(number)

    def _move_acked(self, position: Position) -> None:
        for number in sorted(self._segments):
            is_written = self._fd is not None and number == max(self._segments)
            if (
                number == position.segment
                and position.num_before >= self._segments[number].num_frames
                and not is_written
            ):
                position = Position(number + 1, 0, 0)
        self._acked = position
        done = [number for number in self._segments if number < position.segment]
        try:
            state = {**position._asdict(), "num_dropped": self.num_dropped}
            _replace(self.folder / "acked.json", json.dumps(state))
        finally:
            for number in done:
                self._delete_segment(number)

    def _delete_segment(self, number: int) -> None:
        del self._segments[number]
        (self.folder / _segment_name(number)).unlink(missing_ok=True)

    def _read_segment(self, number: int, offset: int) -> bytes:
        try:
            with open(self.folder / _segment_name(number), "rb") as file:
                file.seek(offset)
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            self._count_lost(number)
            return b""
        except OSError as error:
            raise SpoolError(f"cannot read the spool folder {self.folder}: {error.strerror}") from error

    def _release(self, unlock: bool = True) -> None:
        if self._lock is not None:
            lock, self._lock = self._lock, None
            if unlock:
                fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


_held: weakref.WeakSet[Spool] = weakref.WeakSet()


def _release_in_child() -> None:
    # A forked child (a data loader's worker) shares the lock and would keep it after the trainer is gone.
    for spool in list(_held):
        with contextlib.suppress(OSError):
            spool._release(unlock=False)


os.register_at_fork(after_in_child=_release_in_child)


def _segment_name(number: int) -> str:
    return f"{number:08d}.seg"


def _thinned(segment: Path) -> Path:
    """The file for the frames that stay when this segment is thinned out."""
    return segment.with_name(f"{segment.name}.new")


def find_segments(folder: Path) -> Iterator[tuple[int, Path]]:
    """The number and the path of each segment; what somebody else has put beside them is none."""
    for path in folder.glob("*.seg"):
        if path.stem.isdecimal() and path.name == _segment_name(int(path.stem)):
            yield int(path.stem), path


def _read_acked(folder: Path) -> tuple[Position, int] | None:
    """What `acked.json` says of place and dropped frames; None where there is none that can be meant."""
    try:
        acked = json.loads((folder / "acked.json").read_bytes())
        numbers = [acked[name] for name in ("segment", "offset", "num_before", "num_dropped")]
    except (OSError, *_DAMAGE):
        return None
    if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
        return None
    return Position(*numbers[:3]), numbers[3]


_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading a file of JSON may raise that holds anything whatever."""


def read_end_state(folder: Path) -> RunState | None:
    """What the writer of the spool left in `end.json`, where it did."""
    try:
        state = json.loads((folder / "end.json").read_bytes())["state"]
    except (OSError, *_DAMAGE):
        return None
    return state if state in ("running", "finished", "failed") else None


def read_run(folder: Path) -> tuple[dict[str, Any], str, str]:
    """The registration, the writer, and the whole text of `run.json`."""
    try:
        text = (folder / "run.json").read_text(encoding="utf-8")
        registration = json.loads(text)
        writer = registration.pop("writer")
        registration.pop("created_at")
        names = [registration["project"], registration["run"], registration["attempt_key"], writer]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("project, run, attempt_key and writer should be text")
    except _DAMAGE as error:
        raise SpoolError(
            f"{folder / 'run.json'} is damaged, so nobody knows whose frames these are: {error}"
        ) from error
    return registration, writer, text


def _lock(folder: Path) -> int:
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and flock the last owner may have deleted the spool, and this file with it.
        if os.fstat(fd).st_nlink == 0:
            raise FileNotFoundError(None, "it was delivered and deleted just now")
    except BlockingIOError as error:
        os.close(fd)
        raise SpoolInUse(
            f"the spool folder {folder} is in use by a living process, which delivers it itself"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


@contextlib.contextmanager
def _telling(action: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except SpoolError:
        raise
    except OSError as error:
        raise SpoolError(
            f"cannot {action} the spool folder {folder}: {error.strerror or error}; "
            "make it writable, free some space, or choose another folder (spool_dir)"
        ) from error
