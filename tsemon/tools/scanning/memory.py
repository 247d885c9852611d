"""How much memory may still be taken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Of the machine, and of the containers that this process is in; where a system does not tell, all that it has."""
    try:
        free = _numbers(proc / "meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *_left(proc / "self" / "cgroup", cgroups)])


def _left(own: Path, cgroups: Path) -> Iterator[int]:
    """Of each group with a limit; pages of files in memory make room."""
    try:
        [path] = [line[3:].strip("/") for line in own.read_text().splitlines() if line.startswith("0::")]
    except (OSError, ValueError):
        return
    for group in (cgroups / path, *(cgroups / path).parents):
        try:
            limit = int((group / "memory.max").read_text())  # "max" where there is none
            stat = _numbers(group / "memory.stat")
            taken = int((group / "memory.current").read_text()) - stat["active_file"] - stat["inactive_file"]
        except (OSError, ValueError, KeyError):
            continue
        yield max(0, limit - taken)


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}
