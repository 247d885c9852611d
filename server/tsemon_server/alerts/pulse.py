"""How long a process has been silent, or stuck, and what is usual for it.

What counts is what the service saw on a clock that cannot be set: a run that is heard of is another than it was at the
last look. Times that a database holds would tell the same until somebody sets a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

MIN_SEEN = 3
"""So many of a kind make something usual."""
MAX_SILENCE_S = 60.0
"""A longer one says nothing of steps: a process that was stopped made none, one that was cut off made them unheard."""
MAX_HEARD = 31
MAX_PACES = 360
"""Of these the median is taken: an hour of looks, of which a pause is a few."""
NUM_RECENT = 5
"""Of these, too: a single pause changes no pace."""


@dataclass
class _Age:
    """How long something has stayed as it is."""

    since: float
    at_least: float = 0.0
    """What had been seen of that before this process began to look; the time in between is not counted."""

    def seconds(self, now: float) -> float:
        """NaN while it was longer than could be seen since."""
        seen = now - self.since
        return seen if seen >= self.at_least else math.nan

    def known(self, now: float) -> float:
        return max(now - self.since, self.at_least)


class Pulse:
    """One run, looked at now and then. `kept` is what `to_json` gave an earlier process, or none."""

    def __init__(self, now: float, kept: Mapping[str, Any] | None = None) -> None:
        kept = kept or {}
        self._heard_at: float | None = kept.get("heard_at")
        self._step: int | None = kept.get("step")
        self._silence = _Age(now, kept.get("silent_s", 0.0))
        self._standstill = _Age(now, kept.get("stuck_s", 0.0))
        self._has_heard = self._has_stepped = False
        """Whether the last time was seen by this process: only then it is known how long ago it was."""
        self._heard: deque[float] = deque(kept.get("heard", ()), MAX_HEARD)
        self._paces: deque[float] = deque(kept.get("paces", ()), MAX_PACES)
        self._longest_pause: float = kept.get("longest_pause_s", math.nan)

    def look(self, now: float, heard_at: float, step: int | None) -> None:
        """Take note of what is known of the run: when it was last heard of, by anybody's clock, and at which step."""
        if heard_at == self._heard_at:
            return
        silent_s = now - self._silence.since
        if silent_s > MAX_SILENCE_S:
            self._standstill.since += silent_s
        if step != self._step:
            self._note_step(now, step, is_whole=silent_s <= MAX_SILENCE_S)
        if self._has_heard:
            self._heard.append(silent_s)
        self._has_heard = True
        self._heard_at, self._silence = heard_at, _Age(now)

    def _note_step(self, now: float, step: int | None, is_whole: bool) -> None:
        if self._has_stepped and step is not None and self._step is not None and step > self._step:
            if is_whole:
                self._paces.append((now - self._standstill.since) / (step - self._step))
            pause_s = self._standstill.known(now)
            self._longest_pause = pause_s if math.isnan(self._longest_pause) else max(self._longest_pause, pause_s)
        self._has_stepped = True
        self._step, self._standstill = step, _Age(now)

    def scalars(self, now: float) -> dict[str, float]:
        """What rules on the clock can ask for; NaN is what is not known."""
        has_step = self._step is not None
        return {
            "silent_seconds": self._silence.seconds(now),
            # While it is silent nobody knows whether it steps.
            "stuck_seconds": self._standstill.seconds(self._silence.since) if has_step else math.nan,
            "usual_heard_seconds": _usual(self._heard),
            "usual_step_seconds": _usual(self._paces),
            "step_seconds": _usual([*islice(reversed(self._paces), NUM_RECENT)]) if has_step else math.nan,
            "longest_pause_seconds": self._longest_pause,
        }

    def to_json(self, now: float) -> dict[str, Any]:
        return {
            "heard_at": self._heard_at,
            "step": self._step,
            "silent_s": self._silence.known(now),
            "stuck_s": self._standstill.known(self._silence.since),
            "heard": [*self._heard],
            "paces": [*self._paces],
            "longest_pause_s": self._longest_pause,
        }


def _usual(seen: Sequence[float]) -> float:
    return median(seen) if len(seen) >= MIN_SEEN else math.nan
