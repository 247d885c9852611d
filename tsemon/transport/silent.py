"""The outbox of a process whose samples go out with those of another."""

from __future__ import annotations

from collections.abc import Callable

from tsemon.transport.outbox import OutboxStats
from tsemon.wire import Alert, Frame, Incident, RunState


class SilentOutbox:
    """Sends nothing: rank 0 sends for the whole group, and is the one to which alerts ride back."""

    step = 0
    num_dropped = 0

    def __init__(self) -> None:
        self._alerts: dict[str, Alert] = {}

    def hear(self, alert: Alert) -> None:
        """Take it from rank 0 that an alert has changed."""
        self._alerts[alert.alert_id] = alert
        if alert.state == "resolved":
            del self._alerts[alert.alert_id]

    def resume_at(self, step: int) -> None:
        pass

    def put(self, make_frame: Callable[[int], Frame]) -> bool:
        return True

    def alerts(self) -> list[Alert]:
        return list(self._alerts.values())

    def incidents(self) -> list[Incident]:
        return []

    def take_events(self) -> list[Alert]:
        return []

    def stats(self) -> OutboxStats:
        return OutboxStats()

    def close(self, timeout_s: float = 5.0, state: RunState = "finished") -> None:
        pass
