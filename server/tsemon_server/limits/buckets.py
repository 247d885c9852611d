"""How often somebody may do something: token buckets, which have nothing to do with tokens that let people in."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_KEYS = 10_000
"""Whoever was not seen for longest is forgotten beyond this, and so begins anew."""


class Buckets:
    """Per key a bucket that fills by `per_s` a second up to `most`, and is full for whoever is new."""

    def __init__(self, per_s: float, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._most, self._clock = per_s, most, clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> float:
        """Take 1 where there is as much; else the seconds after which there will be."""
        level = self._level(key)
        if level < 1:
            return (1 - level) / self._per_s
        self._set(key, level - 1)
        return 0.0

    def charge(self, key: str, cost: float) -> None:
        """Take what was used already. The debt is at most one full bucket: nobody pays for ever."""
        self._set(key, max(self._level(key) - cost, -self._most))

    def wait_s(self, key: str) -> float:
        """The seconds after which 1 can be taken."""
        return max(0.0, (1 - self._level(key)) / self._per_s)

    def _level(self, key: str) -> float:
        level, at = self._levels.get(key, (self._most, 0.0))
        return min(self._most, level + (self._clock() - at) * self._per_s)

    def _set(self, key: str, level: float) -> None:
        self._levels[key] = level, self._clock()
        self._levels.move_to_end(key)
        if len(self._levels) > MAX_KEYS:
            self._levels.popitem(last=False)
