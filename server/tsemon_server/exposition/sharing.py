"""Counters that the workers of one service have in common: whichever of them is scraped tells of all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

FILE_BYTES = 2**20
"""Of each file, more than it ever holds."""

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def share_counters(folder: Path, number: int) -> None:
    """From now on, what this process counts is kept in a file in `folder`: worker `number` goes on where that one was
    before whom it replaces, so that no counter goes back. Call it before any counter is made."""
    for gauges in folder.glob(f"gauge_*_{number}.db"):  # what was under way in the other one is not any more
        gauges.unlink(missing_ok=True)
    # Written to now, for a disk that is full when a counter grows into a file's empty part would be the process's end.
    for kind in ("counter", "histogram", "gauge_livesum"):
        file = folder / f"{kind}_{number}.db"
        with suppress(OSError):
            if not file.exists():
                whole = file.with_suffix(".new")
                whole.write_bytes(bytes(FILE_BYTES))
                whole.rename(file)  # another worker that is scraped meanwhile reads each file that is there
    os.environ[_FOLDER] = str(folder)
    # By default it is a file per pid: those would pile up.
    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]


def counted(registry: CollectorRegistry) -> Iterable[Metric]:
    """What this process has counted, or all workers together."""
    if not values.ValueClass._multiprocess:
        return registry.collect()
    found: Iterable[Metric] = MultiProcessCollector(None, os.environ[_FOLDER]).collect()  # type: ignore[no-untyped-call]
    return found
