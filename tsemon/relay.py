"""Alerts and incidents on their way from rank 0 to all ranks, as numbers in the collective of a sample."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Sequence

from tsemon.errors import InvalidArgument
from tsemon.wire import Alert, Incident

BYTES_PER_NUMBER = 3  # numbers become float32 on their way to the host
NUM_NUMBERS = 256
MAX_BYTES = BYTES_PER_NUMBER * NUM_NUMBERS
KINDS = (Alert, Incident)
FIELDS = (
    (
        "alert_id",
        "rule",
        "family",
        "severity",
        "state",
        "pending_step",
        "firing_step",
        "resolved_step",
        "incident_id",
        "summary",
    ),
    ("incident_id", "rule", "family", "severity", "state", "step", "left_step", "blocks", "is_settled", "summary"),
)
"""Fields of each kind that travel. Evidence and advice may be long; they stay with rank 0."""


class Relay:
    """One process's end. Rank 0 sends one change a sample, incidents first; every rank, it too, receives the same.

    What went into a sample that was lost goes into the next one.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Alert | Incident, list[float]]] = deque()
        self._sent: deque[Alert | Incident] = deque()

    def put(self, changed: Alert | Incident) -> None:
        """Send this one in a coming sample. Raises InvalidArgument for one that is too long."""
        is_first = isinstance(changed, Incident)  # it may have many alerts
        place = sum(isinstance(one, Incident) for one, _ in self._waiting) if is_first else len(self._waiting)
        self._waiting.insert(place, (changed, _to_numbers(changed)))

    def next_numbers(self) -> list[float]:
        """What this process adds to the collective: numbers >= 0, all of them 0 where it has nothing to say."""
        return self._waiting[0][1] if self._waiting else [0.0] * NUM_NUMBERS

    def confirm(self) -> None:
        """The ranks have agreed on a sample with `next_numbers` in it: the alert in them is on its way."""
        if self._waiting:
            self._sent.append(self._waiting.popleft()[0])

    def received(self, numbers: Sequence[float]) -> Alert | Incident | None:
        """The change in the largest numbers of all ranks, whole where this one sent it; None where there is none."""
        if not any(numbers):
            return None
        changed = _from_numbers(numbers)
        while self._sent:  # one that nobody could read comes before it
            own = self._sent.popleft()
            if _key(own) == _key(changed):
                return own
        return changed

    def take_back(self) -> list[Alert | Incident]:
        """What was put and has not been received, in order."""
        left = [*self._sent, *(changed for changed, _ in self._waiting)]
        self._sent.clear()
        self._waiting.clear()
        return left


def _key(changed: Alert | Incident) -> tuple[int, str, str, str, str]:
    kind = KINDS.index(type(changed))
    return kind, getattr(changed, FIELDS[kind][0]), changed.state, changed.rule, changed.severity


def _to_numbers(changed: Alert | Incident) -> list[float]:
    """The alert or incident, its summary cut where there is no room for it."""
    text = _to_bytes(changed)
    while len(text) > MAX_BYTES:
        if not changed.summary:
            raise InvalidArgument(f"the names of {_key(changed)[1]!r} are too long to be told to other ranks")
        changed = dataclasses.replace(changed, summary=changed.summary[: len(changed.summary) * 3 // 4])
        text = _to_bytes(changed)
    text = text.ljust(MAX_BYTES, b"\0")
    places = range(0, MAX_BYTES, BYTES_PER_NUMBER)
    return [float(int.from_bytes(text[place : place + BYTES_PER_NUMBER], "big")) for place in places]


def _to_bytes(changed: Alert | Incident) -> bytes:
    kind = KINDS.index(type(changed))
    values = [kind, *(getattr(changed, name) for name in FIELDS[kind])]
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()


def _from_numbers(numbers: Sequence[float]) -> Alert | Incident:
    text = b"".join(int(number).to_bytes(BYTES_PER_NUMBER, "big") for number in numbers).rstrip(b"\0")
    kind, *values = json.loads(text)
    fields = dict(zip(FIELDS[kind], values, strict=True)) | {"advice": {}}
    return Incident(**fields) if kind else Alert(**fields, evidence={})
