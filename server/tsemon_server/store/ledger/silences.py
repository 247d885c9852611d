"""Alerts of which nobody is told for a while."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, bindparam, delete, insert, or_, select

from tsemon.errors import UnknownSilence
from tsemon_server.store.engine import fits_pattern
from tsemon_server.store.ledger import tables
from tsemon_server.store.records import Silence
from tsemon_server.store.times import utc


def is_silenced() -> ColumnElement[bool]:
    """Whether an alert, selected with its run, is silenced at the time `now`."""
    silence, alert, run = tables.silence.c, tables.alert.c, tables.run.c
    return (
        select(silence.silence_id)
        .where(
            silence.until > bindparam("now"),
            or_(silence.rule.is_(None), silence.rule == alert.rule),
            or_(silence.family.is_(None), silence.family == alert.family),
            or_(silence.project.is_(None), silence.project == run.project),
            or_(silence.run.is_(None), fits_pattern(run.run, silence.run)),
        )
        .correlate(tables.alert, tables.run)
        .exists()
    )


def silences(connection: Connection, now: float) -> list[Silence]:
    """Those that have not ended, the first to end first."""
    c = tables.silence.c
    rows = connection.execute(select(tables.silence).where(c.until > now).order_by(c.until, c.silence_id))
    return [
        Silence(
            silence_id=str(row.silence_id),
            **{name: getattr(row, name) for name in ("rule", "run", "project", "family", "created_by", "reason")},
            until=utc(row.until),
            created_at=utc(row.created_at),
        )
        for row in rows
    ]


def add_silence(
    connection: Connection,
    now: float,
    *,
    rule: str | None,
    run: str | None,
    project: str | None,
    family: str | None,
    until: float,
    created_by: str,
    reason: str,
) -> str:
    """Its id."""
    fits = {"rule": rule, "run": run, "project": project, "family": family}
    about = {"until": until, "created_at": now, "created_by": created_by, "reason": reason}
    added = connection.execute(insert(tables.silence).values(**fits, **about).returning(tables.silence.c.silence_id))
    return str(added.scalar_one())


def remove_silence(connection: Connection, silence_id: str) -> None:
    c = tables.silence.c
    number = number_of(silence_id)
    if number is None or not connection.execute(delete(tables.silence).where(c.silence_id == number)).rowcount:
        raise UnknownSilence(f"no silence has the id {silence_id!r}; the list of silences has those there are")


def number_of(opaque_id: str) -> int | None:
    """The number that an id stands for; None for what cannot be one."""
    return int(opaque_id) if opaque_id.isdecimal() and len(opaque_id) < 10 else None
