"""Carries frames from a training process to the service, and loses none on the way: see docs/delivery.md."""

from tsemon.transport.folders import find_spools
from tsemon.transport.http import HttpDelivery
from tsemon.transport.memory import MemorySpool
from tsemon.transport.outbox import Outbox, OutboxStats
from tsemon.transport.reading import SpoolReader
from tsemon.transport.silent import SilentOutbox
from tsemon.transport.spool import Spool
from tsemon.transport.sync import Synced, sync

__all__ = [
    "HttpDelivery",
    "MemorySpool",
    "Outbox",
    "OutboxStats",
    "SilentOutbox",
    "Spool",
    "SpoolReader",
    "Synced",
    "find_spools",
    "sync",
]
