"""Small results of many blocks that are reduced together: a kernel for all of them costs as much as one for each.

Axes: E entries (blocks or hidden states), N of them that have results of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from tsemon.measures.sums import NOTHING, Partial, Partials
from tsemon.probes.reading import stacked

MAX_NUMBERS = 2**22
"""Numbers that are kept before they are reduced: 16 MiB in float32."""

Reduce = Callable[[tuple[Tensor, ...], Any], Partials]


class Deferred(Container[int]):
    """Tuples of tensors by entry. `reduce` gets all tuples of one kind together.

    reduce((N, ...) each, how) returns sums with the leading axis N.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self.clear()

    def clear(self) -> None:
        self._waiting: dict[Hashable, tuple[list[int], list[Sequence[Tensor]], Any]] = {}
        self._num_waiting = 0
        self._reduced: dict[int, tuple[int, Partials]] = {}
        """By entry: its place in sums of several entries."""
        self._entries = set[int]()

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: int, values: Sequence[Tensor], how: Any = None, key: Hashable = None) -> None:
        """Keep the results of one entry. `how` is passed to `reduce`, and `key` is the same for the same `how`."""
        kind = (key, *((x.shape, x.dtype, x.device) for x in values))
        entries, of_entries, _ = self._waiting.setdefault(kind, ([], [], how))
        entries.append(entry)
        of_entries.append(values)
        self._entries.add(entry)
        self._num_waiting += sum(x.numel() for x in values)
        if self._num_waiting > MAX_NUMBERS:
            self._reduce_waiting()

    def drop(self, entry: int) -> None:
        self._entries.discard(entry)

    def collect(self, num_entries: int) -> Partials:
        """The sums of all entries, (E, ...) each, with nothing for entries without a result."""
        self._reduce_waiting()
        known = {entry: self._reduced[entry] for entry in sorted(self._entries)}
        if not known:
            return {}
        _, first = known[min(known)]
        places = [(entry, place) for entry, (place, sums) in known.items() if sums is first]
        if places == [(entry, entry) for entry in range(num_entries)]:
            return first
        found: Partials = {}
        for name, merge in {
            name: partial.merge for _, sums in known.values() for name, partial in sums.items()
        }.items():
            rows = {entry: sums[name].value[place] for entry, (place, sums) in known.items() if name in sums}
            found[name] = Partial(stacked(map(rows.get, range(num_entries)), NOTHING[merge]), merge)
        return found

    def _reduce_waiting(self) -> None:
        for entries, of_entries, how in self._waiting.values():
            sums = self._reduce(tuple(map(torch.stack, zip(*of_entries, strict=True))), how)
            self._reduced |= {entry: (place, sums) for place, entry in enumerate(entries)}
        self._waiting.clear()
        self._num_waiting = 0
