"""TensorBoard's event files: records with checksums, each a protocol buffer `Event`.

As in TensorBoard, each folder that holds event files is a run, and its files are one after the other what was written.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboard.compat.proto import event_pb2

from tsemon.tools.importing.source import FileLog, Found, Notes, Row, SourceRun, as_time, digest, files_in

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_CHECKED_BYTES = 2**16
"""Larger records are pictures and the like, which are left out: their checksum, byte by byte, would take seconds."""
_LARGEST = 2**30
_OTHERS = {"histo": "histograms", "image": "images", "audio": "audio"}


def is_event_file(path: Path) -> bool:
    return "tfevents" in path.name and not path.name.endswith(".profile-empty")


def find_runs(path: Path) -> Found:
    """The runs at a path: one event file, or a folder with such files in it and below."""
    by_folder: dict[Path, list[EventFile]] = {}
    damages: list[str] = []
    for file in files_in(path, damages):
        if not is_event_file(file):
            continue
        try:
            by_folder.setdefault(file.parent, []).append(EventFile(file))
        except OSError as error:
            damages.append(f"{file} cannot be read: {error.strerror or error}")
    runs = []
    for folder, logs in sorted(by_folder.items()):
        logs.sort(key=lambda log: (log.began, log.name))
        below = folder.relative_to(path).as_posix() if path.is_dir() else "."
        root = path if path.is_dir() else folder
        name = root.resolve().name if below == "." else f"{root.resolve().name}/{below}"
        key = digest("tfevents", logs[0].first_record or f"{name}/{logs[0].name}")
        runs.append(SourceRun(kind="tfevents", key=key, where=str(folder), name=name, logs=logs))
    return Found(runs, damages)


class EventFile(FileLog):
    """One event file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with open(path, "rb") as file:
            self.first_record = next(_records(file.fileno(), self, Notes()), (b"", 0))[0]
        try:
            self.began = float(event_pb2.Event.FromString(self.first_record).wall_time)
        except DecodeError:
            self.began = 0.0

    def rows(self, notes: Notes) -> Iterator[Row]:
        plugins: dict[str, str] = {}
        modified = self.modified
        with open(self.path, "rb") as file:
            for ordinal, (record, place) in enumerate(_records(file.fileno(), self, notes)):
                try:
                    event = event_pb2.Event.FromString(record)
                except DecodeError:
                    notes.damage(f"{self.path}: record {ordinal} is no event, and is left out")
                    continue
                values = list(_scalars(event, plugins, notes))
                if values and (step := notes.step(event.step, values[0][0])) is not None:
                    yield Row(ordinal, step, as_time(event.wall_time, modified), values, place)


def _scalars(event: Any, plugins: dict[str, str], notes: Notes) -> Iterator[tuple[str, float]]:
    for value in event.summary.value:
        # Only the first value of a tag says what it is.
        plugin = value.metadata.plugin_data.plugin_name or plugins.get(value.tag, "")
        if plugin and len(plugins) < 100_000:
            plugins[value.tag] = plugin
        what = value.WhichOneof("value")
        if what == "simple_value":
            yield value.tag, value.simple_value
        elif what == "tensor" and plugin in ("scalars", ""):
            number = _number(value.tensor)
            if number is None:
                notes.leave_out("tensors", value.tag)
            else:
                yield value.tag, number
        elif plugin != "hparams":
            notes.leave_out(plugin or _OTHERS.get(what, "others"), value.tag)


def _number(tensor: Any) -> float | None:
    """The value of a tensor with one number."""
    if any(dim.size != 1 for dim in tensor.tensor_shape.dim):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    try:
        return float(make_ndarray(tensor).item())
    except (TypeError, ValueError):
        return None


def _records(fd: int, log: FileLog, notes: Notes) -> Iterator[tuple[bytes, int]]:
    """Each sound record, and where it ends."""
    size, place = os.fstat(fd).st_size, 0
    while place < size:
        header = os.pread(fd, _HEADER.size, place)
        if len(header) < _HEADER.size:
            log.is_torn(notes)
            return
        length, checksum = _HEADER.unpack(header)
        if _masked_crc(header[:8]) != checksum or length > _LARGEST:
            if not place:
                notes.damage(f"{log.path} does not begin as an event file does; nothing of it is imported")
                return
            notes.damage(
                f"{log.path} is damaged at byte {place}; what is before it is imported, what is behind it is lost"
            )
            return
        whole = os.pread(fd, length + _FOOTER.size, place + _HEADER.size)
        if len(whole) < length + _FOOTER.size:
            log.is_torn(notes)
            return
        record, at = whole[:length], place
        place += _HEADER.size + length + _FOOTER.size
        if length <= _CHECKED_BYTES and _FOOTER.unpack(whole[length:])[0] != _masked_crc(record):
            notes.damage(f"{log.path}: the record at byte {at} is damaged, and is left out")
            record = b""
        yield record, place


def _make_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return tuple(table)


_TABLE = _make_table()


def _masked_crc(data: bytes) -> int:
    """CRC-32C, turned and shifted as the format wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
