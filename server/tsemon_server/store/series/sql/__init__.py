"""Frames in tables of the ledger's own database, SQLite or PostgreSQL: both halves share a transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, func, literal, literal_column, select, union_all
from sqlalchemy.exc import IntegrityError

from tsemon.wire import Frame
from tsemon_server.store.engine import Database, Unit
from tsemon_server.store.series import Added, Left, Shape, finding
from tsemon_server.store.series.cells import Ints
from tsemon_server.store.series.checks import Checked, Report
from tsemon_server.store.series.exporting import PackedExport
from tsemon_server.store.series.frames import HotFrame, Measured, PastFrame, measured, unpacked
from tsemon_server.store.series.metric import PackedMetric
from tsemon_server.store.series.packing import KINDS, Kind, Layout, unpack
from tsemon_server.store.series.settling import Sizes, num_segments, packed
from tsemon_server.store.series.sql import steps as of_steps
from tsemon_server.store.series.sql import tables
from tsemon_server.store.series.sql.adding import Stored, add
from tsemon_server.store.series.sql.checking import RunCheck
from tsemon_server.store.series.sql.metric import SqlMetricRows
from tsemon_server.store.series.sql.rows import SqlFrameRows, layouts_of
from tsemon_server.store.series.sql.settling import (
    FramesChanged,
    hot_streams,
    oldest_frames,
    reduce_segment,
    remove_slice,
    replace_frames,
    runs_to_reduce,
    segments_to_reduce,
)
from tsemon_server.store.streams import Address, At, Newest, Span, Standing, Stream, Visible

log = logging.getLogger(__name__)

MOST_LAYOUTS = 2000
"""Maximum number of layouts in memory: the newest values of live runs, and the packing of frames, need a few of them."""


class SqlSeries:
    """A Series whose unit is a transaction of `database`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._stored = Stored()
        self._known: dict[tuple[str, int], Layout] = {}

    def add(self, unit: Unit, stream: Stream, frames: Sequence[Frame]) -> Added:
        return add(unit, self._stored, stream, frames)

    def known(self, unit: Unit, run_id: str) -> Mapping[tuple[Kind, str], Shape]:
        c = tables.layout.c
        query = select(c.kind, c.metric, func.max(c.num_rows), func.max(c.num_columns)).where(c.run_id == run_id)
        rows = unit.connection.execute(query.group_by(c.kind, c.metric).order_by(c.kind, c.metric))
        return {(kind, metric): (num_rows, num_columns) for kind, metric, num_rows, num_columns in rows}

    def newest(self, unit: Unit, run_id: str, visible: Visible) -> Newest | None:
        return finding.newest(self._rows(unit, run_id), run_id, visible)

    def live(self, unit: Unit, newest: Sequence[Address]) -> Mapping[str, Sequence[Measured]]:
        hot = dict(of_steps.newest_hot(unit.connection, newest))
        return {
            address.stream.run_id: self._measured(unit, address, hot.get(address.stream.run_id, ()))
            for address in newest
        }

    def at(
        self, unit: Unit, steps: Mapping[str, At], kinds: Collection[Kind] = KINDS
    ) -> Mapping[str, Sequence[PastFrame]]:
        found: dict[str, Sequence[PastFrame]] = {}
        for run_id, frames in of_steps.hot_at(unit.connection, steps):
            layouts = self._layouts(unit.connection, run_id, {frame.layout_id for frame in frames})
            found[run_id] = [unpacked(frame, layouts[frame.layout_id], kinds) for frame in frames]
        for run_id in of_steps.settled_at(unit.connection, steps):
            step, attempt = steps[run_id]
            of_step = [Span(attempt, step, step)]
            found[run_id] = list(PackedExport(self._rows(unit, run_id), run_id, of_step, kinds=kinds).frames())
        return found

    def nearest(self, unit: Unit, run_id: str, visible: Visible, step: int) -> At | None:
        return finding.nearest(self._rows(unit, run_id), run_id, visible, step)

    def seconds_at(self, unit: Unit, run_id: str, visible: Visible, steps: Ints) -> NDArray[np.float64]:
        return finding.seconds_at(self._rows(unit, run_id), run_id, visible, steps)

    def read(
        self, unit: Unit, run_id: str, visible: Visible, kind: Kind, metric: str, entry: Shape | None = None
    ) -> PackedMetric:
        rows = SqlMetricRows(unit.connection, run_id, visible, kind, metric, entry)
        return PackedMetric(rows, run_id, kind, metric, entry)

    def export(self, unit: Unit, run_id: str, visible: Visible, metrics: Collection[str] | None = None) -> PackedExport:
        return PackedExport(self._rows(unit, run_id), run_id, visible, metrics)

    def backlog(self, unit: Unit, most: int) -> int:
        some = select(literal_column("1")).select_from(tables.frame).limit(most).subquery()
        return int(unit.connection.execute(select(func.count()).select_from(some)).scalar_one())

    def run_ids(self, unit: Unit) -> Iterable[tuple[str, str]]:
        of_tables = (select(literal(table.name), table.c.run_id).distinct() for table in tables.ALL)
        return [(table, run_id) for table, run_id in unit.connection.execute(union_all(*of_tables))]

    # -- in transactions of its own

    def settle(
        self,
        standing: Callable[[Collection[str]], Mapping[str, Standing]],
        now: float,
        sizes: Sizes,
        is_stopped: Callable[[], bool],
    ) -> int:
        num_done = 0
        with self._database.reading() as connection:
            streams = hot_streams(connection)
        stands = standing({stream.run_id for stream, _ in streams})
        for stream, num_frames in streams:
            for _ in range(num_segments(stream, num_frames, stands.get(stream.run_id), sizes)):
                if is_stopped() or not self._settle_one(stream, standing([stream.run_id]), now, sizes.segment):
                    break
                num_done += 1
        return num_done

    def _settle_one(self, stream: Stream, stands: Mapping[str, Standing], now: float, num_frames: int) -> bool:
        if stream.run_id not in stands:
            return False
        newest = stands[stream.run_id].newest
        stays = newest.seq if newest is not None and newest.stream == stream else None
        with self._database.reading() as connection:
            frames = oldest_frames(connection, stream, num_frames, stays)
            layouts = self._layouts(connection, stream.run_id, {frame.layout_id for frame in frames})
        segment = packed(stream, frames, layouts)
        if segment is None:
            return False
        try:
            with self._database.writing() as connection:
                replace_frames(connection, segment, now)
        except (FramesChanged, IntegrityError):  # deleted, or another process was faster
            return False
        return True

    def reduce(
        self,
        left: Left,
        settled_before: float,
        of: Callable[[Collection[str]], Collection[str]],
        is_stopped: Callable[[], bool],
    ) -> bool:
        with self._database.reading() as connection:
            run_ids = of(runs_to_reduce(connection, left, settled_before))
        for run_id in run_ids:
            with self._database.reading() as connection:
                segments = segments_to_reduce(connection, run_id, left, settled_before)
            for stream, number in segments:
                if is_stopped():
                    return True
                with self._database.writing() as connection:
                    reduce_segment(connection, stream, number, left)
        return bool(run_ids)

    def drop(self, run_id: str, is_stopped: Callable[[], bool]) -> bool:
        while not is_stopped():
            with self._database.writing() as connection:
                if not remove_slice(connection, run_id):
                    return True
        return False

    def check(self, run_id: str, report: Report) -> Checked:
        return RunCheck(self._database, run_id, report).run()

    # -- helpers

    def _rows(self, unit: Unit, run_id: str) -> SqlFrameRows:
        return SqlFrameRows(unit.connection, run_id, self._layouts)

    def _measured(self, unit: Unit, newest: Address, frames: Sequence[HotFrame]) -> Sequence[Measured]:
        run_id, attempt, writer = newest.stream
        is_there = any(frame.writer == writer and frame.seq == newest.seq for frame in frames)
        # Where later ones were hidden, this one may have settled.
        if not is_there and not of_steps.is_hot(unit.connection, newest):
            of_step = self.at(unit, {run_id: At(newest.step, attempt)}).get(run_id, ())
            return [measured(frame) for frame in of_step if (frame.writer, frame.seq) == (writer, newest.seq)]
        layouts = self._layouts(unit.connection, run_id, {frame.layout_id for frame in frames})
        found = []
        for frame in frames:
            layout = layouts[frame.layout_id]
            if layout.is_sound(frame):
                found.append(Measured(frame.writer, unpack(layout, frame.blob)))
            else:
                log.error("a frame of run %s is damaged; `tsemon admin check` lists them all", run_id)
        return found

    def _layouts(self, connection: Connection, run_id: str, layout_ids: Collection[int]) -> Mapping[int, Layout]:
        """They never change: what one look finds, another need not look up."""
        found = {number: known for number in layout_ids if (known := self._known.get((run_id, number)))}
        if missing := [number for number in layout_ids if number not in found]:
            found |= layouts_of(connection, run_id, missing)
            if len(self._known) >= MOST_LAYOUTS:
                self._known.clear()
            self._known.update({(run_id, number): found[number] for number in missing})
        return found
