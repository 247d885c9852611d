"""Carries frames from a training process to the service, and loses none on the way: see docs/delivery.md."""

from tsemon.transport.folders import find_spools as find_spools
from tsemon.transport.http import HttpDelivery as HttpDelivery
from tsemon.transport.memory import MemorySpool as MemorySpool
from tsemon.transport.outbox import Outbox as Outbox
from tsemon.transport.outbox import OutboxStats as OutboxStats
from tsemon.transport.reading import SpoolReader as SpoolReader
from tsemon.transport.recorded import RunWriter as RunWriter
from tsemon.transport.recorded import attempt_key as attempt_key
from tsemon.transport.recorded import run_writer as run_writer
from tsemon.transport.silent import SilentOutbox as SilentOutbox
from tsemon.transport.spool import Spool as Spool
from tsemon.transport.sync import Synced as Synced
from tsemon.transport.sync import sync as sync
