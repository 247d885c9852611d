"""Summaries of runs, so that a list of runs reads no frame."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, bindparam, exists, literal_column, select, update

from tsemon.errors import UnknownRun
from tsemon.wire import Frame
from tsemon_server.store.ledger import tables
from tsemon_server.store.ledger.attempts import HEARD_S, LEASE_S
from tsemon_server.store.prepared import Prepared
from tsemon_server.store.streams import Newest, Stream

_MOST_TELL = 64
"""Writers of an attempt that may say why they do not measure something."""

_run, _attempt = tables.run.c, tables.attempt.c
_other = tables.attempt.alias("other")
_is_other_live = and_(
    _other.c.run_id == _attempt.run_id,
    _other.c.attempt != _attempt.attempt,
    _other.c.state == "running",
    _other.c.heard_at >= bindparam("live_since"),
)
_KNOWN = Prepared(
    select(
        _run.attempt,
        _run.num_frames,
        _run.last_step,
        _run.loss,
        _run.process_step,
        _run.stepped_at,
        _attempt.hidden_from,
        _attempt.state,
        _attempt.heard_at,
        _attempt.zoom_asked_at,
        _attempt.is_zoom_told,
        exists(literal_column("1")).where(_is_other_live).correlate(tables.attempt),
    )
    .join(tables.attempt, _attempt.run_id == _run.run_id)
    .where(_run.run_id == bindparam("run_id"), _attempt.attempt == bindparam("attempt"))
    .with_for_update(of=tables.run)
)
_NOTE = (
    update(tables.run)
    .where(_run.run_id == bindparam("which"))
    .values({name: bindparam(name) for name in ("updated_at", "num_frames", "process_step", "stepped_at")})
)
_PLACE = ("last_attempt", "last_writer", "last_seq", "last_step", "loss", "latest")
_NOTE_NEWEST = Prepared(_NOTE.values({name: bindparam(name) for name in _PLACE}))
_NOTE_OLDER = Prepared(_NOTE)
_HEAR_OF_ATTEMPT = Prepared(
    update(tables.attempt)
    .where(_attempt.run_id == bindparam("which"), _attempt.attempt == bindparam("of_attempt"))
    .values(state=bindparam("state"), heard_at=bindparam("heard_at"))
)
_as_json = json.JSONEncoder(separators=(",", ":")).encode


class Known(NamedTuple):
    """The row of a run when frames come."""

    attempt: int
    num_frames: int
    last_step: int | None
    loss: float | None
    process_step: int | None
    stepped_at: float | None
    hidden_from: int
    """Where the attempt of these frames ends to be seen."""
    state: str
    """The attempt's state."""
    heard_at: float
    zoom_asked_at: float | None
    """Time of a person's request for a zoom, until the process has the request."""
    is_zoom_told: bool
    """Whether the request was in a response to frames."""
    has_others: bool
    """Whether other attempts of the run are live."""


class Summaries:
    """Summaries of runs. They are absolute: writing one twice is the same as writing it once."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection, self._now = connection, now

    def of(self, run_id: str, attempt: int) -> Known:
        """Read the row of the run for one of its attempts. Others that write the run wait from here on."""
        live_since = self._now - LEASE_S - HEARD_S
        which = {"run_id": run_id, "attempt": attempt, "live_since": live_since}
        row = _KNOWN.run(self._connection, which).fetchone()
        if row is None:
            raise UnknownRun(
                f"no run has the id {run_id!r}; it may have been deleted, and to register it makes it anew"
            )
        return Known(*row)

    def note(self, stream: Stream, known: Known, added: Sequence[Frame], num_stored: int) -> None:
        """Note that frames of the stream were added, and how many the run has now."""
        seen = (frame for frame in added if frame.step < known.hidden_from)
        newest = max(seen, key=lambda frame: (frame.step, frame.seq), default=None)
        is_newest = newest is not None and (known.last_step is None or newest.step >= known.last_step)
        reached = max((frame.step for frame in added), default=None) if stream.attempt == known.attempt else None
        self._write(stream.run_id, known, _newest(stream, newest) if is_newest else None, num_stored, reached)

    def repair(self, run_id: str, known: Known, newest: Newest | None, num_stored: int) -> None:
        """Note the newest frame of the run and its number of frames, whatever the row had."""
        reached = newest.step if newest is not None and newest.attempt == known.attempt else None
        self._write(run_id, known, newest, num_stored, reached)

    def _write(self, run_id: str, known: Known, newest: Newest | None, num_stored: int, reached: int | None) -> None:
        noted = {"which": run_id, "updated_at": self._now, **self._process(known, reached)}
        noted["num_frames"] = max(known.num_frames, num_stored)
        if newest is None:
            _NOTE_OLDER.run(self._connection, noted)
        else:
            place = columns_of(newest, known.loss)
            _NOTE_NEWEST.run(self._connection, noted | place | {"latest": _as_json(place["latest"])})

    def note_not_measured(self, stream: Stream, frames: Sequence[Frame]) -> None:
        """What the last of these frames says of it counts, unless a later frame has told already."""
        telling = max((f for f in frames if f.not_measured is not None), key=lambda frame: frame.seq, default=None)
        if telling is None:
            return
        which = (_attempt.run_id == stream.run_id, _attempt.attempt == stream.attempt)
        told = dict(self._connection.execute(select(_attempt.not_measured).where(*which)).scalar_one())
        seq = told.get(stream.writer, {"seq": -1})["seq"]
        if telling.seq > seq and (stream.writer in told or len(told) < _MOST_TELL):
            told[stream.writer] = {"seq": telling.seq, "why": telling.not_measured}
            self._connection.execute(update(tables.attempt).where(*which).values(not_measured=told))

    def hear_of(self, run_id: str, attempt: int, step: int, loss: tuple[int, float] | None = None) -> Known:
        """Note that an attempt's process is alive, and at which step; the step of an older attempt is not the run's.

        loss: The step and value of the newest loss without a frame. The loss of a later frame stays.
        """
        known = self.of(run_id, attempt)
        self.hear_of_attempt(run_id, attempt, known)
        if attempt == known.attempt:
            is_newer = loss is not None and (known.last_step is None or loss[0] > known.last_step)
            newer = {"loss": loss[1]} if loss is not None and is_newer else {}
            heard = update(tables.run).where(_run.run_id == run_id)
            self._connection.execute(heard.values(updated_at=self._now, **self._process(known, step), **newer))
        return known

    def hear_of_attempt(self, run_id: str, attempt: int, known: Known) -> None:
        """Renew its lease. An attempt that was taken for dead is running again; one that has ended stays ended."""
        is_over = known.state in ("finished", "failed")
        if is_over or (known.state == "running" and 0 <= self._now - known.heard_at < HEARD_S):
            return
        heard = {"which": run_id, "of_attempt": attempt, "state": "running", "heard_at": self._now}
        _HEAR_OF_ATTEMPT.run(self._connection, heard)

    def tell_zoom(self, run_id: str, attempt: int, known: Known, *, is_repeated: bool) -> float | None:
        """Return the time of a request for a zoom that belongs into the response to these frames.

        The response may get lost, and then frames are repeated. If the next ones are all new, the process has the request.
        """
        if known.zoom_asked_at is None or is_repeated:
            return known.zoom_asked_at
        asked_at = None if known.is_zoom_told else known.zoom_asked_at
        which = (_attempt.run_id == run_id, _attempt.attempt == attempt)
        told = {"zoom_asked_at": asked_at, "is_zoom_told": asked_at is not None}
        self._connection.execute(update(tables.attempt).where(*which).values(told))
        return asked_at

    def _process(self, known: Known, step: int | None) -> dict[str, Any]:
        """Where the process is, and since when: it moves with a step that is larger than those before."""
        if step is not None and (known.process_step is None or step > known.process_step):
            return {"process_step": step, "stepped_at": self._now}
        return {"process_step": known.process_step, "stepped_at": known.stepped_at}


def _newest(stream: Stream, frame: Frame | None) -> Newest | None:
    if frame is None:
        return None
    return Newest(frame.step, stream.attempt, frame.seq, stream.writer, frame.time, frame.scalars)


def columns_of(newest: Newest | None, loss: float | None = None) -> dict[str, Any]:
    """The columns of a run's row for its newest frame. A frame without a loss leaves `loss`."""
    if newest is None:
        return dict.fromkeys(_PLACE)
    latest = {"time": newest.time, "scalars": dict(newest.scalars)}
    place = (newest.attempt, newest.writer, newest.seq, newest.step, newest.scalars.get("loss", loss), latest)
    return dict(zip(_PLACE, place, strict=True))
