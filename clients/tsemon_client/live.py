"""Server-sent events: from the bytes of a stream to records, and how to come back to it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from tsemon_answers.runs import Source
from tsemon_client.models import AlertChanged, Connected, Event, RunChanged, RunDeleted

LONGEST_PAUSE_S = 30.0


class Stream:
    """Reads one connection after the other; knows how long to wait between them."""

    def __init__(self, source: Source | None) -> None:
        self._source = source
        self._first_pause_s = self._next_pause_s = 2.0
        self.has_spoken = False
        """Whether there was ever an event: then a lost connection is worth another."""
        self._rest = b""
        self._name = ""
        self._data: list[str] = []

    def feed(self, part: bytes) -> Iterator[Event]:
        """The events that are complete with these bytes."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            yield from self._line(line.rstrip(b"\r").decode("utf-8", "replace"))

    def pause_s(self) -> float:
        """The connection is lost: how long to wait before the next. Longer each time until one speaks."""
        self._rest, self._name, self._data = b"", "", []  # an event that was cut off is none
        pause_s = self._next_pause_s * random.uniform(0.5, 1.0)
        self._next_pause_s = min(2 * self._next_pause_s, LONGEST_PAUSE_S)
        return pause_s

    def _line(self, line: str) -> Iterator[Event]:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            yield from self._event()
        elif name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
        elif name == "retry" and value.isascii() and value.isdigit():
            self._first_pause_s = min(int(value) / 1000, LONGEST_PAUSE_S)

    def _event(self) -> Iterator[Event]:
        name, data, self._name, self._data = self._name, "\n".join(self._data), "", []
        self._next_pause_s, self.has_spoken = self._first_pause_s, True
        if name in _READ:  # a newer service may tell of more
            try:
                kind, document = _READ[name]
                yield kind.model_validate_json(document % data, context=self._source)
            except ValidationError:  # a service of another version: an event that cannot be read is none
                return


_READ: Mapping[str, tuple[type[Event], str]] = {
    "ready": (Connected, "%s"),
    "run": (RunChanged, '{"run": %s}'),
    "alert": (AlertChanged, '{"alert": %s}'),
    "deleted": (RunDeleted, "%s"),
}
"""By the name of an event its record, and the record's JSON around the event's data."""
