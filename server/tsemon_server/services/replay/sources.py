"""What is named on the command line as recordings, and can be opened here or in another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tsemon.errors import InvalidRecording
from tsemon.transport import find_spools
from tsemon_server.services.replay.recording import Recording
from tsemon_server.services.replay.spools import SpooledRun
from tsemon_server.services.replay.traces import Trace


@dataclass(frozen=True)
class Source:
    """The files of one recording: a trace, or the spool folders of one run, oldest first."""

    paths: tuple[Path, ...]

    def open(self) -> Recording:
        """Raises InvalidRecording or SpoolError where it is none, and OSError where it cannot be read."""
        first = self.paths[0]
        return SpooledRun(self.paths) if first.is_dir() else Trace(first)


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """In the order in which they are named; those in a folder by name, then its spools."""
    found: list[Source] = []
    for path in paths:
        if not path.exists():
            raise InvalidRecording(
                f"expected a trace (.jsonl or .jsonl.gz), a spool folder or a folder of such, but {path} is not there"
            )
        found += _in_folder(path) if path.is_dir() else [Source((path,))]
    return found


def _in_folder(folder: Path) -> list[Source]:
    if (folder / "run.json").exists():
        return [Source((folder,))]
    traces = [Source((path,)) for path in sorted(folder.glob("*.jsonl*"))]
    of_runs: dict[Path, list[Path]] = {}
    for spool in find_spools(folder):
        of_runs.setdefault(spool.parent, []).append(spool)
    found = [*traces, *(Source(tuple(spools)) for spools in of_runs.values())]
    if not found:
        raise InvalidRecording(f"expected traces (.jsonl or .jsonl.gz) or spools in {folder}, which has neither")
    return found
