"""Recorded trainings, read. The README in tests/data/traces says what they are."""

from __future__ import annotations

import functools
import gzip
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsemon_server.rules.program import View
from tsemon_server.services.replay.traces import Trace as Recording

FOLDER = Path(__file__).parents[2] / "data/traces"


@dataclass(frozen=True)
class Trace:
    """One recorded training."""

    header: dict[str, Any]
    losses: list[float]
    """The loss of every step, from step 0."""
    views: list[View]

    @property
    def name(self) -> str:
        return str(self.header["name"])

    @property
    def family(self) -> str:
        return str(self.header["family"])

    @property
    def is_gray(self) -> bool:
        return bool(self.header["gray"])

    @property
    def is_healthy(self) -> bool:
        return not self.header["failing"] and not self.is_gray


@functools.cache
def read(path: Path) -> Trace:
    with gzip.open(path, "rt") as lines:
        told = {entry["t"]: entry for entry in map(json.loads, lines) if entry["t"] in ("run", "loss")}
    losses = [math.nan if loss is None else loss for loss in told["loss"]["loss"]]
    return Trace(told["run"], losses, [view for attempt in Recording(path).attempts() for view in attempt.views])


def read_all(folder: Path = FOLDER) -> list[Trace]:
    return [read(path) for path in sorted(folder.glob("*.jsonl.gz"))]
