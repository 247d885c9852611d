"""The events that a transaction logs after its commit."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import Context, copy_context
from typing import Any, NamedTuple


class Event(NamedTuple):
    """Something that happened."""

    request: Context
    """In which it happened."""
    what: str
    fields: dict[str, Any]


class Journal:
    """The events of one transaction."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.changed_alerts: dict[int, Context] = {}
        """By id, and in which request."""

    def tell(self, what: str, run_id: str, **fields: Any) -> None:
        """Something happened to a run."""
        self.events.append(Event(copy_context(), what, {"run_id": run_id, **fields}))

    def tell_of_alerts(self, alert_ids: Iterable[int]) -> None:
        """Note that alerts change. The log shows them as they are at the end."""
        for alert_id in alert_ids:
            self.changed_alerts[alert_id] = copy_context()
