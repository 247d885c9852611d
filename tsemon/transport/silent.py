"""The outbox of a process whose samples go out with those of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tsemon.transport.outbox import OutboxStats
from tsemon.wire import Alert, Frame, Incident, Rows, RunState


class SilentOutbox:
    """Sends nothing: rank 0 sends for the whole group, and is the one to which alerts ride back."""

    step = 0
    has_news = False
    cpu_s = 0.0
    num_dropped = 0
    waiting_rules = None

    def __init__(self) -> None:
        self._alerts: dict[str, Alert] = {}
        self._incidents: dict[str, Incident] = {}

    def hear(self, changed: Alert | Incident) -> None:
        """Take an alert or incident that has changed from rank 0."""
        if isinstance(changed, Alert):
            self._alerts[changed.alert_id] = changed
        else:
            self._incidents[changed.incident_id] = changed
        self._alerts = {key: one for key, one in self._alerts.items() if not one.is_over}
        self._incidents = {key: one for key, one in self._incidents.items() if not one.is_over}

    def resume_at(self, step: int) -> None:
        pass

    def put(self, make_frame: Callable[[int], Frame]) -> bool:
        return True

    def put_rows(self, make_rows: Callable[[int], Iterable[Rows]]) -> bool:
        return True

    def flush(self, timeout_s: float) -> None:
        pass

    def alerts(self) -> tuple[Alert, ...]:
        return tuple(self._alerts.values())

    def incidents(self) -> list[Incident]:
        return list(self._incidents.values())

    def ask_for_rules(self) -> None:
        pass

    def take_events(self) -> list[Alert | Incident]:
        return []

    def stats(self) -> OutboxStats:
        return OutboxStats()

    def close(self, timeout_s: float = 5.0, state: RunState = "finished") -> None:
        pass
