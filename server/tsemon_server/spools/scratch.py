"""A private temporary folder of which nothing stays."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_PREFIX = "tsemon-index-"
_MARK = "index of a spool folder, for one process of tsemon"
"""A file by which a leftover is told from anybody's folder of such a name."""


class Scratch:
    """A folder below TMPDIR that goes with `close`; what a killed process left goes when the next one starts."""

    def __init__(self) -> None:
        _remove_leftovers()
        self.path, claim = _make()
        self._remove = weakref.finalize(self, _remove, self.path, claim)

    def close(self) -> None:
        self._remove()


def _make() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        claim = _claim(path)
        if claim is not None and path.exists():
            (path / _MARK).touch()
            return path, claim
        # Another process started at this moment and took it for a leftover.
        if claim is not None:
            os.close(claim)


def _remove_leftovers() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        claim = _claim(path) if (path / _MARK).is_file() else None
        if claim is not None:
            _remove(path, claim)


def _claim(path: Path) -> int | None:
    """A lock on the folder, which ends with the process however it ends; None where it is not ours to have."""
    try:
        claim = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(claim).st_uid == os.geteuid():
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return claim
    except OSError:
        pass
    os.close(claim)
    return None


def _remove(path: Path, claim: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(claim)
