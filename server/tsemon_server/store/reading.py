"""The topics of one transaction that reads."""

from __future__ import annotations

from tsemon_server.store.engine import Unit
from tsemon_server.store.frames import Frames
from tsemon_server.store.ledger.alerts import Alerts
from tsemon_server.store.ledger.incidents import Incidents
from tsemon_server.store.ledger.liveness import Liveness
from tsemon_server.store.ledger.progress import RuleProgress
from tsemon_server.store.ledger.retention import Retentions
from tsemon_server.store.ledger.rules import Rules
from tsemon_server.store.ledger.runs import Runs
from tsemon_server.store.ledger.silences import Silences
from tsemon_server.store.live import Live
from tsemon_server.store.series import Series
from tsemon_server.store.times import utc


class Reader:
    """One state of the database."""

    def __init__(self, unit: Unit, now: float, series: Series[Unit]) -> None:
        connection = unit.connection
        now = utc(now).timestamp()  # as records show it: a cursor that was made from a record finds its place again
        self.frames = Frames(unit, series)
        self.runs = Runs(connection, now, self.frames)
        self.alerts = Alerts(connection, now)
        self.incidents = Incidents(connection, now)
        self.silences = Silences(connection, now)
        self.rules = Rules(connection, now)
        self.progress = RuleProgress(connection)
        self.liveness = Liveness(connection)
        self.retention = Retentions(connection)
        self.live = Live(unit, series)
