"""Carries frames from a training process to the service, and loses none on the way: see docs/delivery.md."""

from tsemon.transport.folders import find_spools
from tsemon.transport.http import HttpDelivery
from tsemon.transport.memory import MemorySpool
from tsemon.transport.names import check_name
from tsemon.transport.outbox import Outbox, OutboxStats, WaitingRules
from tsemon.transport.reading import SpoolReader
from tsemon.transport.recorded import RunWriter, attempt_key, run_writer
from tsemon.transport.silent import SilentOutbox
from tsemon.transport.spool import Spool
from tsemon.transport.sync import Synced, sync

__all__ = [
    "HttpDelivery",
    "MemorySpool",
    "Outbox",
    "OutboxStats",
    "RunWriter",
    "SilentOutbox",
    "Spool",
    "SpoolReader",
    "Synced",
    "WaitingRules",
    "attempt_key",
    "check_name",
    "find_spools",
    "run_writer",
    "sync",
]
