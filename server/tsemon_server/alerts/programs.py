"""Rules that are compiled, kept for the projects that are likely to need them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple

from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.rule import Rule

MOST_BYTES = 128 * 2**20
"""Enough for about 300 projects that each have the built-in rules and some of their own."""


class Compiled(NamedTuple):
    """Rules, ready to read frames."""

    rules: tuple[Rule, ...]
    evaluator: Evaluator
    """Evaluator for the rules that read frames."""
    on_clock: Evaluator
    """Evaluator for the rules that read the server's clock."""

    @property
    def size_bytes(self) -> int:
        return self.evaluator.size_bytes + self.on_clock.size_bytes


class Programs:
    """Compiled rules by their content. Projects with the same rules share them.

    If all together take more than `most_bytes`, the least recently used ones are dropped.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, Compiled] = OrderedDict()
        self._size_bytes = 0
        self._lock = Lock()

    def of(self, key: str, rules: Callable[[], Sequence[Rule]]) -> Compiled:
        """The compiled rules of a key. `rules` gives the rules if they have to be compiled."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        each = tuple(rules())
        made = Compiled(each, Evaluator(each), Evaluator(each, on="clock"))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._size_bytes += made.size_bytes
                while self._size_bytes > self._most_bytes and len(self._kept) > 1:
                    self._size_bytes -= self._kept.popitem(last=False)[1].size_bytes
            return self._kept[key]
