"""Work that one process at a time does, on any engine: a row says who has it, and until when."""

from __future__ import annotations

from sqlalchemy import Connection, delete, or_, select, update

from tsemon_server.store.engine import insert_missing
from tsemon_server.store.ledger import tables

SETTLING = "settled"
"""In place of the name of a work that is held: of one that was done."""

_lease = tables.lease.c


def hold_lease(connection: Connection, work: str, holder: str, now: float, seconds: float) -> bool:
    """Take the work, or keep it; False while another process has it."""
    insert_missing(connection, tables.lease, [{"work": work, "holder": holder, "until": now + seconds}])
    is_free = or_(_lease.holder == holder, _lease.until < now, _lease.until > now + 2 * seconds)  # a clock was set back
    taken = update(tables.lease).where(_lease.work == work, is_free).values(holder=holder, until=now + seconds)
    return bool(connection.execute(taken).rowcount)


def drop_lease(connection: Connection, work: str, holder: str) -> None:
    """Let others have it at once."""
    connection.execute(delete(tables.lease).where(_lease.work == work, _lease.holder == holder))


def note_done(connection: Connection, work: str, at: float) -> None:
    """Note when work was last done. Nobody holds it: its time is past."""
    insert_missing(connection, tables.lease, [{"work": work, "holder": "", "until": at}])
    connection.execute(update(tables.lease).where(_lease.work == work).values(until=at))


def done_at(connection: Connection, work: str) -> float | None:
    """When work was last done; None where nobody knows."""
    return connection.execute(select(_lease.until).where(_lease.work == work)).scalar_one_or_none()
