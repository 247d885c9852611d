"""Alerts of which nobody is told for a while."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, delete, insert, or_, select

from tsemon.errors import InvalidArgument, UnknownSilence
from tsemon_answers.alerts import Silence
from tsemon_server.store.engine import fits_pattern
from tsemon_server.store.ledger import tables
from tsemon_server.store.times import utc

_silence = tables.silence.c


def is_silenced() -> ColumnElement[bool]:
    """Whether an alert, selected with its run, is silenced at the time `now`."""
    alert, run = tables.alert.c, tables.run.c
    return (
        select(_silence.silence_id)
        .where(
            _silence.until > bindparam("now"),
            or_(_silence.rule.is_(None), _silence.rule == alert.rule),
            or_(_silence.family.is_(None), _silence.family == alert.family),
            or_(_silence.project.is_(None), _silence.project == run.project),
            or_(_silence.run.is_(None), fits_pattern(run.run, _silence.run)),
        )
        .correlate(tables.alert, tables.run)
        .exists()
    )


def number_of(opaque_id: str) -> int | None:
    """The number that an id stands for; None for what cannot be one."""
    return int(opaque_id) if opaque_id.isdecimal() and len(opaque_id) < 10 else None


class Silences:
    """All silences."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection, self._now = connection, now

    def all(self) -> list[Silence]:
        """Those that have not ended, the first to end first."""
        query = select(tables.silence).where(_silence.until > self._now)
        rows = self._connection.execute(query.order_by(_silence.until, _silence.silence_id))
        return [
            Silence(
                silence_id=str(row.silence_id),
                **{name: getattr(row, name) for name in ("rule", "run", "project", "family", "created_by", "reason")},
                until=utc(row.until),
                created_at=utc(row.created_at),
            )
            for row in rows
        ]


class SilenceChanges(Silences):
    """Changes of silences."""

    def add(self, **values: Any) -> Silence:
        """Tell nobody of the alerts that fit; `values` are the fields of the record that somebody chooses."""
        if values["until"] <= self._now:
            now, until = (utc(seconds).isoformat() for seconds in (self._now, values["until"]))
            raise InvalidArgument(f"expected `until` later than now, which is {now} here, got {until}")
        added = insert(tables.silence).values(created_at=self._now, **values).returning(_silence.silence_id)
        silence_id = str(self._connection.execute(added).scalar_one())
        return next(silence for silence in self.all() if silence.silence_id == silence_id)

    def remove(self, silence_id: str) -> None:
        """Let it end now."""
        number = number_of(silence_id)
        removed = delete(tables.silence).where(_silence.silence_id == number)
        if number is None or not self._connection.execute(removed).rowcount:
            raise UnknownSilence(
                f"no silence has the id {silence_id!r}; see the list of silences for the existing ones"
            )
