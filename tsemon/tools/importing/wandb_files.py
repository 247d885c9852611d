"""W&B's offline runs: `run-*.wandb`, a log of records in blocks of 32 KiB, each a protocol buffer `Record`."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from tsemon.tools.importing.source import FileLog, Found, Notes, Row, SourceRun, as_time, digest, files_in
from tsemon.wire import RunState

_FILE_HEADER = b":W&B\xe1\xbe\x00"
_HEADER = struct.Struct("<IHB")
_BLOCK = 2**15
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_LARGEST = 2**30


def find_runs(path: Path) -> Found:
    """The runs at a path: one `.wandb` file, or a folder with such files in it and below."""
    by_run: dict[tuple[str, str, str], list[WandbFile]] = {}
    damages: list[str] = []
    seen: set[Path] = set()
    for file in files_in(path, damages):
        if file != path and file.suffix != ".wandb":
            continue
        if (real := file.resolve()) in seen:  # wandb links to its latest run
            continue
        seen.add(real)
        try:
            log = WandbFile(file)
        except OSError as error:
            damages.append(f"{file} cannot be read: {error.strerror or error}")
            continue
        if not log.run_id:
            damages.append(f"{file} cannot be read: it does not begin as a file of wandb does, or says of no run")
            continue
        by_run.setdefault((log.entity, log.project, log.run_id), []).append(log)
    runs = []
    for identity, logs in sorted(by_run.items()):
        logs.sort(key=lambda log: (log.began, str(log.path)))
        last = logs[-1]
        runs.append(
            SourceRun(
                kind="wandb",
                key=digest("wandb", *identity),
                where=str(last.path),
                project=last.project or None,
                name=last.display_name or last.run_id,
                config={name: value for log in logs for name, value in log.config.items()},
                tags=last.tags,
                state=last.state,
                logs=logs,
            )
        )
    return Found(runs, damages)


class WandbFile(FileLog):
    """One file of one process. What it says of the run is read at once, its history when it is asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.name = path.parent.name + "/" + path.name
        self.entity = self.project = self.run_id = self.display_name = ""
        self.began = 0.0
        self.tags: list[str] = []
        self.config: dict[str, Any] = {}
        self.state: RunState = "finished"
        for record, _ in self._records(Notes()):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self._take(record.run)
            elif kind == "config":
                self._configure(record.config)
            elif kind == "exit":
                self.state = "failed" if record.exit.exit_code else "finished"

    def _take(self, run: Any) -> None:
        self.entity, self.project, self.run_id = run.entity, run.project, run.run_id
        self.display_name, self.tags = run.display_name, list(run.tags)
        self.began = run.start_time.seconds + run.start_time.nanos / 1e9
        self._configure(run.config)

    def _configure(self, config: Any) -> None:
        for item in config.update:
            name = item.key or ".".join(item.nested_key)
            if name and name != "_wandb":
                self.config[name] = _json(item.value_json)

    def rows(self, notes: Notes) -> Iterator[Row]:
        ordinal = 0
        modified = self.modified
        for record, place in self._records(notes):
            if record.WhichOneof("record_type") != "history":
                continue
            values: list[tuple[str, float]] = []
            step: object = record.history.step.num
            when: object = None
            objects = {item.nested_key[0] for item in record.history.item if item.nested_key[1:] == ["_type"]}
            for item in record.history.item:
                parts = list(item.nested_key) or [item.key]
                name = ".".join(parts)
                if parts[0] in objects:
                    if parts[1:] == ["_type"]:
                        notes.leave_out(f"{_json(item.value_json)}", parts[0])
                    continue
                value = _json(item.value_json)
                if name == "_timestamp":
                    when = value
                elif name == "_step":
                    step = value
                elif name != "_runtime":
                    values.extend(numbers(name, value, notes))
            known = notes.step(step, f"{step}"[:40])
            if values and known is not None:
                yield Row(ordinal, known, as_time(when, modified), values, place)
            ordinal += 1

    def _records(self, notes: Notes) -> Iterator[tuple[Any, int]]:
        with open(self.path, "rb") as file:
            for data, place in _log_records(file.fileno(), self, notes):
                try:
                    yield Record.FromString(data), place
                except DecodeError:
                    notes.damage(f"{self.path}: the record that ends at byte {place} is damaged, and is left out")


def numbers(name: str, value: object, notes: Notes) -> Iterable[tuple[str, float]]:
    """The numbers in a logged value, those of nested dicts with dots in their names. The rest is noted."""
    if isinstance(value, bool | int | float):
        try:
            return [(name, float(value))]
        except OverflowError:
            return [(name, float("inf") if value > 0 else float("-inf"))]
    if value in ("NaN", "Infinity", "-Infinity"):
        return [(name, float(value))]
    if isinstance(value, dict) and value and "_type" not in value:
        return [found for key, inner in value.items() for found in numbers(f"{name}.{key}", inner, notes)]
    if isinstance(value, dict):
        notes.leave_out(str(value.get("_type", "objects")), name)
    elif value is not None:
        notes.leave_out("text" if isinstance(value, str) else "lists", name)
    return []


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _log_records(fd: int, log: FileLog, notes: Notes) -> Iterator[tuple[bytes, int]]:
    """Each sound record, and where it ends. A damaged one costs what is left of its block."""
    size, place = os.fstat(fd).st_size, len(_FILE_HEADER)
    if os.pread(fd, place, 0) != _FILE_HEADER:
        return
    parts: list[bytes] = []
    is_open = False
    while place < size:
        left = _BLOCK - place % _BLOCK
        if left < _HEADER.size:
            place += left
            continue
        header = os.pread(fd, _HEADER.size, place)
        if len(header) < _HEADER.size:
            break
        checksum, length, kind = _HEADER.unpack(header)
        data = os.pread(fd, length, place + _HEADER.size)
        if len(data) < length and place + _HEADER.size + length > size:
            break
        is_sound = zlib.crc32(data, zlib.crc32(bytes([kind]))) == checksum and length <= left - _HEADER.size
        if not is_sound or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            notes.damage(f"{log.path} is damaged at byte {place}; reading goes on with the next block")
            place += left
            parts, is_open = [], False
            continue
        place += _HEADER.size + length
        if kind in (_FULL, _FIRST):
            parts, is_open = [], True
        if is_open:
            parts.append(data)
            if sum(map(len, parts)) > _LARGEST:
                parts, is_open = [], False
        if kind in (_FULL, _LAST) and is_open:
            yield b"".join(parts), place
            parts, is_open = [], False
    if place < size or is_open:
        log.is_torn(notes)
