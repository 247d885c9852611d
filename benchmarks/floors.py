"""What the machine itself takes to keep a frame: the least that any store can hope for."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cost import stopwatch
from figures import Spent


@dataclass(frozen=True)
class Floor:
    """Keeping `num_frames` frames of `frame_bytes` bytes, each safe on the disk before the next."""

    name: str
    num_frames: int
    frame_bytes: int
    spent: Spent
    size_bytes: int
    """What they take on the disk."""


def floors(folder: Path, frame_bytes: int, num_frames: int) -> list[Floor]:
    """Raw appends with fsync, and SQLite with one blob INSERT per commit (WAL, synchronous = FULL, as the store has it)."""
    blob = os.urandom(frame_bytes)  # nothing that a file system could shrink
    return [
        _floor("raw append, fsync per frame", _append, folder / "floor.bin", blob, num_frames),
        _floor("SQLite, one blob INSERT per commit", _insert, folder / "floor.db", blob, num_frames),
    ]


def _floor(name: str, keep: Callable[[Path, bytes, int], None], path: Path, blob: bytes, num_frames: int) -> Floor:
    path.unlink(missing_ok=True)
    spent = stopwatch()
    keep(path, blob, num_frames)
    took = spent()
    size_bytes = path.stat().st_size
    path.unlink()
    return Floor(name, num_frames, len(blob), took, size_bytes)


def _append(path: Path, blob: bytes, num_frames: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(num_frames):
            file.write(blob)
            os.fsync(file)


def _insert(path: Path, blob: bytes, num_frames: int) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE frame (seq INTEGER PRIMARY KEY, blob BLOB NOT NULL)")
    for seq in range(num_frames):
        connection.execute("INSERT INTO frame VALUES (?, ?)", (seq, blob))  # outside a transaction: commits at once
    connection.close()
