"""States of a training in a folder of their own. A file appears whole or not at all, and the newest few are kept."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tsemon.errors import CheckpointError, InvalidArgument, MissingData, reason

NAME = re.compile(r"step-(\d+)\.pt")
RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
PARTS: dict[str, type] = {
    "step": int,
    "recipe": dict,
    "model": dict,
    "optimizer": dict,
    "schedule": dict,
    "batches": dict,
    "processes": list,
}
"""What the state of a training has."""


class Checkpoints:
    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise InvalidArgument(f"at least 1 checkpoint is kept, got {keep}")
        self.folder = folder
        self._keep = keep

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Makes the folder and keeps other processes out of it. Raises CheckpointError where it cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(self.folder / "lock")
            for part in self.folder.glob("step-*.part"):  # of a process that was killed while it saved
                part.unlink(missing_ok=True)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be written to {self.folder}: {reason(error)}; choose another folder: --checkpoints"
            ) from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # a folder with checkpoints stays
                (self.folder / "lock").unlink()
                self.folder.rmdir()
            os.close(lock)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Writes the file, then deletes the oldest ones that are too many. Raises CheckpointError where it cannot."""
        path = self.folder / f"step-{step:08}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(path, state)
        except OSError as error:
            older = self.paths()
            left = f"make room; --resume goes on from {older[-1]}" if older else "make room and start again"
            raise CheckpointError(f"the checkpoint {path} could not be written: {reason(error)}; {left}") from error
        for old in self.paths()[: -self._keep]:
            old.unlink()
        return path

    def paths(self) -> list[Path]:
        """In the order of steps."""
        found = [path for path in self.folder.glob("step-*.pt") if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")))

    def load_newest(self) -> dict[str, Any]:
        """Tensors and plain values alone: nothing that a file asks for is run. Raises MissingData where there is none."""
        path = self.newest()
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file fails in the reader's many ways
            raise InvalidArgument(
                f"{path} cannot be read as a checkpoint: {reason(error)}; {self._instead()}"
            ) from error
        if not isinstance(state, dict):
            raise InvalidArgument(
                f"{path} is no checkpoint of tsemon train: it holds one {type(state).__name__}; {self._instead()}"
            )
        missing = [name for name, kind in PARTS.items() if not isinstance(state.get(name), kind)]
        if missing:
            raise InvalidArgument(
                f"{path} is no checkpoint of tsemon train: without {', '.join(missing)}; {self._instead()}"
            )
        return state

    def newest(self) -> Path:
        """Raises MissingData where there is none."""
        paths = self.paths()
        if not paths:
            raise MissingData(f"no checkpoint in {self.folder}; start the run without --resume")
        return paths[-1]

    def _instead(self) -> str:
        older = self.paths()[:-1]
        return f"delete it to resume from {older[-1]}" if older else "there is no older one; start a new run"


def run_name(name: str) -> str:
    """The name, if it can be that of one folder. Raises InvalidArgument."""
    if not RUN_NAME.fullmatch(name):
        raise InvalidArgument(
            f"a run's name is 1 to 100 letters, digits, '-', '_' and '.', and does not start with '.', got {name!r}; "
            "choose another --run (folders go in --checkpoints)"
        )
    return name


def newest_run(root: Path, recipe: str) -> str:
    """Of the runs that have their name from the recipe and the time, the one that was saved last."""
    named = re.compile(rf"{re.escape(recipe)}-\d{{8}}-\d{{6}}")
    names = [path.name for path in root.glob("*") if named.fullmatch(path.name) and Checkpoints(path).paths()]
    if not names:
        raise MissingData(
            f"{root} holds no run of {recipe} with a checkpoint; start one without --resume, or name it: --run"
        )
    return max(names, key=lambda name: Checkpoints(root / name).paths()[-1].stat().st_mtime_ns)


def _write(path: Path, state: dict[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # otherwise the name may outlive the content when the machine stops
        part.replace(path)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # PyTorch's writer hides a full disk behind its own error
            raise error.__context__ from None
        raise
    finally:
        part.unlink(missing_ok=True)


def _lock(path: Path) -> int:
    """An open file that is locked until it is closed, or the process ends."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.write(lock, str(os.getpid()).encode())  # a full disk makes empty files still
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and flock the last owner may have ended, and deleted the file.
        if os.fstat(lock).st_nlink == 0:
            raise BlockingIOError
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # a file system without locks
            return lock
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        raise CheckpointError(
            f"another process is training the run in {path.parent}; wait for its end, or choose another --run"
        ) from error
    return lock
