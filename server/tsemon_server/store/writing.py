"""The topics of one transaction that changes data."""

from __future__ import annotations

from collections.abc import Iterator

from tsemon_server.store.engine import Unit
from tsemon_server.store.frames import FrameChanges
from tsemon_server.store.ledger.alerts import AlertChanges
from tsemon_server.store.ledger.incidents import IncidentChanges
from tsemon_server.store.ledger.journal import Event, Journal
from tsemon_server.store.ledger.liveness import LivenessChanges
from tsemon_server.store.ledger.progress import RuleProgressChanges
from tsemon_server.store.ledger.retention import RetentionChanges
from tsemon_server.store.ledger.rules import RuleChanges
from tsemon_server.store.ledger.runs import Limits, RunChanges
from tsemon_server.store.ledger.silences import SilenceChanges
from tsemon_server.store.series import Series
from tsemon_server.store.times import utc


class Writer:
    """A transaction: all of it is stored, or nothing. Each topic can be read here, too."""

    def __init__(self, unit: Unit, now: float, series: Series[Unit], limits: Limits) -> None:
        connection, now, journal = unit.connection, utc(now).timestamp(), Journal()
        self._journal = journal
        self.now = now
        self.rules = RuleChanges(connection, now)
        self.progress = RuleProgressChanges(connection)
        self.frames = FrameChanges(unit, series, now, self.progress)
        self.alerts = AlertChanges(connection, now, journal)
        self.incidents = IncidentChanges(connection, now)
        self.runs = RunChanges(connection, now, self.frames, self.alerts, self.progress, journal, limits)
        self.silences = SilenceChanges(connection, now)
        self.liveness = LivenessChanges(connection)
        self.retention = RetentionChanges(connection)

    def finish(self) -> None:
        """Update the incidents. The last act of a transaction, and done before it reads incidents."""
        self.incidents.regroup(self.alerts.changed)
        self.alerts.changed.clear()

    def happened(self) -> Iterator[Event]:
        """What is to be told of this transaction: what runs did, and what the alerts are now that changed."""
        yield from self._journal.events
        changed = self._journal.changed_alerts
        for alert in self.alerts.by_ids(changed) if changed else ():
            known = ("alert_id", "run_id", "project", "run", "rule", "severity", "firing_step", "resolved_step")
            reason = {"resolved_reason": alert.resolved_reason, "acknowledged_by": alert.acknowledged_by}
            fields = {name: getattr(alert, name) for name in known} | reason
            yield Event(changed[int(alert.alert_id)], f"alert {alert.state}", fields)
