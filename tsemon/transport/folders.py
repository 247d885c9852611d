"""Where spools lie: `<root>/<project>/<run>/<attempt key>~<writer>/`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from tsemon.errors import InvalidArgument

_MAX_NAME = 100
"""Longest quoted part of a file name; two of them and a separator stay under the usual limit of 255."""


def quoted(name: str) -> str:
    """`name` as one part of a path: distinct names stay distinct, none is hidden, long or means another folder."""
    if not name:
        raise InvalidArgument("a project, run, attempt key or writer needs at least one character, got an empty name")
    safe = quote(name, safe="", errors="surrogatepass").replace("~", "%7E")
    if safe.startswith("."):
        safe = "%2E" + safe[1:]
    if len(safe) > _MAX_NAME:
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
        safe = f"{safe[: _MAX_NAME - 17]}~{digest}"
    return safe


def find_spools(root: Path | str) -> list[Path]:
    """The folders of all spools under `root`, oldest first."""
    return _by_age(Path(root).glob("*/*/*/run.json"))


def find_siblings(folder: Path) -> list[Path]:
    """The folders of the other spools of the same project and run, oldest first."""
    return [other for other in _by_age(folder.parent.glob("*/run.json")) if other != folder]


def after_siblings(folder: Path, now: float) -> float:
    """The time `now`, or one just after that of the youngest sibling: the clock may have been set back since."""
    youngest = max(map(_created_at, folder.parent.glob("*/run.json")), default=0.0)
    return max(now, math.nextafter(youngest, math.inf))


def _by_age(run_files: Iterator[Path]) -> list[Path]:
    # Attempts are numbered in the order in which they are registered, so the order matters to whoever delivers them.
    return [run_file.parent for run_file in sorted(run_files, key=lambda path: (_created_at(path), path))]


def _created_at(run_file: Path) -> float:
    try:
        return float(json.loads(run_file.read_bytes())["created_at"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0.0
