"""Recorded trainings as benchmarks judge them: what the rules would have seen, the losses, and what is known of the run."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tsemon_server.rules.program import View
from tsemon_server.services.replay.traces import Trace, loss_scalars


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One training."""

    name: str
    family: str
    is_failing: bool
    is_gray: bool
    """Odd, but no failure: it counts nowhere."""
    twin: str
    """The name of the same training without the defect."""
    event_step: int
    """When the defect sets in."""
    losses: list[float]
    """Of every step."""
    views: Sequence[View]

    @property
    def shows_in_loss(self) -> bool:
        """Whether a loss above the twin's tells when the harm begins; otherwise it is taken to begin with the defect."""
        return not (
            self.family == "data"
            or (self.family == "rank" and "ssl" in self.name)
            or self.name.startswith(("data_", "div_spike"))
        )

    def thinned(self, every: int, first: int) -> Iterator[View]:
        """As if only every so many of its samples had been taken: the losses between them are summed up anew."""
        last_step = -1
        for view in self.views[first::every]:
            known = self.losses[: view.step + 1]
            losses = loss_scalars(known[last_step + 1 :], known, known)
            yield replace(view, scalars={**view.scalars, **losses})
            last_step = view.step


def read_all(folder: Path) -> list[Recorded]:
    return [_read(path) for path in sorted(folder.glob("*.jsonl.gz"))]


def _read(path: Path) -> Recorded:
    with gzip.open(path, "rt") as lines:
        entries = [entry for entry in map(json.loads, lines) if entry["t"] in ("run", "loss")]
    about = next(entry for entry in entries if entry["t"] == "run")
    losses = next((entry["loss"] for entry in entries if entry["t"] == "loss"), [])
    return Recorded(
        name=about["name"],
        family=about["family"],
        is_failing=about["failing"],
        is_gray=about["gray"],
        twin=about["twin"],
        event_step=max(0, about["event_step"]),
        losses=[math.nan if loss is None else loss for loss in losses],
        views=[view for attempt in Trace(path).attempts() for view in attempt.views],
    )
