"""Recorded trainings, read. The README in tests/data/traces says what they are."""

from __future__ import annotations

import functools
import gzip
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tsemon_server.rules import View

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

    @property
    def has_tokens(self) -> bool:
        """Whether the model has tokens at all: an MLP has none."""
        return any("token_diversity" in view.layers for view in self.views)


@functools.cache
def read(path: Path) -> Trace:
    header: dict[str, Any] = {}
    losses: list[float] = []
    views = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            if entry["t"] == "run":
                header = entry
            elif entry["t"] == "loss":
                losses = [_float(value) for value in entry["loss"]]
            elif entry["t"] == "frame":
                scalars = {name: _float(value) for name, value in entry["scalars"].items()}
                layers = {name: np.array([_float(v) for v in values]) for name, values in entry["layers"].items()}
                views.append(View(entry["step"], scalars, layers))
    return Trace(header, losses, views)


def read_all(folder: Path = FOLDER) -> list[Trace]:
    return [read(path) for path in sorted(folder.glob("*.jsonl.gz"))]


def onset(trace: Trace, twin: Trace, width: int = 10, share: float = 0.05) -> int | None:
    """The step from which the loss stays above the healthy twin's, by a share of all that the twin learns.

    Both losses are means over the last `width` steps. None where the failing run ends no worse.
    """
    ours, theirs = _trailing_mean(trace.losses, width), _trailing_mean(twin.losses, width)
    margin = share * max(theirs[0] - min(theirs), 1e-6)
    is_worse = [a - b > margin for a, b in zip(ours, theirs, strict=False)]
    if not is_worse[-1]:
        return None
    return max((step + 1 for step, worse in enumerate(is_worse) if not worse), default=0)


def _trailing_mean(values: list[float], width: int) -> list[float]:
    values = [value if math.isfinite(value) else 1e9 for value in values]
    return [sum(tail) / len(tail) for end in range(len(values)) for tail in [values[max(0, end + 1 - width) : end + 1]]]


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)
