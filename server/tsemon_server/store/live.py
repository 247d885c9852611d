"""The newest values of each run that is live, for those who look at all of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Table, case, func, literal_column, select

from tsemon.stacks import Stacks
from tsemon_server.store.engine import Unit
from tsemon_server.store.frames import MOST_BARE
from tsemon_server.store.ledger import tables
from tsemon_server.store.ledger.leases import SETTLING, done_at
from tsemon_server.store.ledger.progress import RuleProgress
from tsemon_server.store.ledger.runs import OF_NEWEST_FRAME
from tsemon_server.store.series import Series
from tsemon_server.store.series.frames import Measured, measured
from tsemon_server.store.series.packing import Values
from tsemon_server.store.streams import Address, Span, Stream

COUNTED_AT_MOST = 200_000
"""What is more than that is not counted on: nobody waits for the count of a table that has grown without end."""


class LiveRun(NamedTuple):
    """A run, and what it measured last."""

    run_id: str
    project: str
    run: str
    step: int | None
    """Of the newest frame; None before the first."""
    process_step: int | None
    seen_at: float
    stepped_at: float | None
    newest: list[Values]
    """The newest frame of each writer, the newest first: what pipeline stages sent of one step, for instance."""
    others: list[Values]
    """Frames that hold what those do not, the newest first."""
    titles: Mapping[str, str] = {}
    """Titles of metrics of the user's own, by name."""
    stacks: Stacks | None = None
    """The stacks of the model; None if all blocks are one stack."""
    num_skipped: int = 0
    """Number of frames that no rule has read."""


class LiveRuns(NamedTuple):
    """Those that were wanted, and how many there are beyond."""

    runs: list[LiveRun]
    num_left_out: int


class Backlog(NamedTuple):
    """Work that waits for a service to do it."""

    frames: int
    """Those in rows of their own: some stay so, and what is more is to be packed."""
    notices: int
    """Changes of alerts of which it is not planned yet who is to hear of them."""
    deliveries: int
    """Messages to be sent."""
    settled_at: float | None
    """Up to when all is packed that is to be; None where no service has kept this database in shape yet."""


class Live:
    """What is live, and what waits to be done."""

    def __init__(self, unit: Unit, series: Series[Unit]) -> None:
        self._unit, self._connection, self._series = unit, unit.connection, series

    def runs(self, *, running_since: float, ended_since: float, most: int) -> LiveRuns:
        """Runs that run and were heard of since the one time, or ended since the other, in the order of ids, with their
        newest values. Where there are too many, each project has its youngest before any has another: one that starts
        many does not take the room of all."""
        run = tables.run.c
        # By age, which does not change: or those that are left out would be others at each look.
        youth = (run.created_at.desc(), run.run_id)
        seen = (run.last_step, run.process_step, run.updated_at, run.stepped_at)
        newest = (run.last_attempt, run.last_writer, run.last_seq, run.quantities, tables.attempt.c.stacks, run.state)
        rows = self._connection.execute(
            select(run.run_id, run.project, run.run, *seen, *newest, func.count().over().label("num_live"))
            .select_from(tables.run.outerjoin(tables.attempt, OF_NEWEST_FRAME))
            .where(run.updated_at >= case((run.state == "running", running_since), else_=ended_since))
            .order_by(func.row_number().over(partition_by=run.project, order_by=youth), *youth)
            .limit(most)
        ).all()
        addresses = [
            Address(Stream(row.run_id, row.last_attempt, row.last_writer), row.last_seq, row.last_step)
            for row in rows
            if row.last_seq is not None
        ]
        found = self._series.live(self._unit, addresses)
        ended = {row.run_id for row in rows if row.state != "running"}
        found = {
            one.stream.run_id: self._with_layers(
                one, found.get(one.stream.run_id, ()), is_over=one.stream.run_id in ended
            )
            for one in addresses
        }
        skipped = RuleProgress(self._connection).num_skipped([row.run_id for row in rows])
        runs = [
            LiveRun(
                *row[:7],
                *_by_writer(found.get(row.run_id, ())),
                _titles(row.quantities),
                Stacks.of(0, row.stacks) if row.stacks else None,
                skipped.get(row.run_id, 0),
            )
            for row in sorted(rows, key=lambda row: row.run_id)
        ]
        return LiveRuns(runs, (rows[0].num_live if rows else 0) - len(rows))

    def _with_layers(self, newest: Address, frames: Sequence[Measured], *, is_over: bool) -> Sequence[Measured]:
        """Add earlier frames if a run has ended with frames that have no layers: those before them may have settled."""
        (run_id, attempt, _), step, found = newest.stream, newest.step, [*frames]
        for _ in range(MOST_BARE if is_over else 0):
            if any(frame.values["layers"] for frame in found):
                break
            earlier = self._series.nearest(self._unit, run_id, [Span(attempt, 0, step - 1)], step)
            if earlier is None:
                break
            found += map(measured, self._series.at(self._unit, {run_id: earlier}).get(run_id, ()))
            step = earlier.step
        return found

    def backlog(self) -> Backlog:
        """What waits to be done, counted up to `COUNTED_AT_MOST`."""
        return Backlog(
            self._series.backlog(self._unit, COUNTED_AT_MOST),
            self._count(tables.notice),
            self._count(tables.delivery, tables.delivery.c.status == "waiting"),
            done_at(self._connection, SETTLING),
        )

    def _count(self, table: Table, *where: ColumnElement[bool]) -> int:
        found = select(literal_column("1")).select_from(table).where(*where).limit(COUNTED_AT_MOST).subquery()
        return int(self._connection.execute(select(func.count()).select_from(found)).scalar_one())


def _titles(quantities: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    return {name: quantity["title"] for name, quantity in quantities.items() if quantity["title"]}


def _by_writer(frames: Sequence[Measured]) -> tuple[list[Values], list[Values]]:
    """The newest frame of each writer, and the others."""
    newest: list[Values] = []
    others: list[Values] = []
    writers: set[str] = set()
    for frame in frames:
        (others if frame.writer in writers else newest).append(frame.values)
        writers.add(frame.writer)
    return newest, others
