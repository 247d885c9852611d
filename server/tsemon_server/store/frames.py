"""The frames of runs: the ledger computes the visible intervals, the series reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from tsemon.wire import Frame, Rows
from tsemon_answers.runs import Recorded
from tsemon_server.store.engine import Unit
from tsemon_server.store.ledger.attempts import visible
from tsemon_server.store.ledger.progress import RuleProgress
from tsemon_server.store.ledger.summaries import Known, Summaries
from tsemon_server.store.schema import NEVER
from tsemon_server.store.series import Series, Shape
from tsemon_server.store.series.cells import Ints
from tsemon_server.store.series.exporting import Export, JoinedTable, Table
from tsemon_server.store.series.frames import PastFrame
from tsemon_server.store.series.metric import Joined, Metric
from tsemon_server.store.series.packing import Kind
from tsemon_server.store.streams import Address, At, Newest, Span, Stream, Which, history_of

MOST_BARE = 12
"""Maximum number of frames that are skipped to find one with layers: several in a row may hold losses alone."""

Layers = Mapping[str, NDArray[np.floating[Any]]]


class Frames:
    """The frames of all runs. Steps that are asked for are both included; without an attempt, what none hides is read."""

    def __init__(self, unit: Unit, series: Series[Unit]) -> None:
        self._unit, self._series = unit, series

    def recorded(self, run_id: str) -> Recorded:
        """The metrics that the run has frames for, or rows."""
        found = self._series.known(self._unit, run_id)
        of_rows = self._series.known(self._unit, history_of(run_id))
        return Recorded(
            scalars=sorted({name for kind, name in (*found, *of_rows) if kind == "scalars"}),
            layers={name: num_rows for (kind, name), (num_rows, _) in found.items() if kind == "layers"},
            heads={name: shape for (kind, name), shape in found.items() if kind == "heads"},
        )

    def metric(
        self, run_id: str, kind: Kind, metric: str, *, entry: Shape | None = None, **which: Unpack[Which]
    ) -> Metric:
        """What is stored of `metric`. `entry` is a row (layer) and a column (head); without it all rows are read."""
        visible = self._visible(run_id, **which)
        of_frames = self._series.read(self._unit, run_id, visible, kind, metric, entry)
        if kind != "scalars":
            return of_frames
        return Joined(of_frames, self._series.read(self._unit, history_of(run_id), visible, kind, metric, entry))

    def export(self, run_id: str, *, metrics: Sequence[str] | None = None, **which: Unpack[Which]) -> Export:
        """Whole frames, with some metrics or all."""
        return self._series.export(self._unit, run_id, self._visible(run_id, **which), metrics)

    def table(self, run_id: str, *, metrics: Sequence[str] | None = None, **which: Unpack[Which]) -> Table:
        """The samples of the same frames, and of steps without a frame."""
        visible = self._visible(run_id, **which)
        return JoinedTable(
            *(self._series.export(self._unit, one, visible, metrics) for one in (run_id, history_of(run_id)))
        )

    def after(
        self, run_id: str, attempt: int, step: int, to_step: int | None = None, *, own: Collection[str] = ()
    ) -> Iterator[Frame]:
        """The attempt's frames after `step` in the order of steps; of one step, by writer and seq.

        own: Names of scalars. Each frame gets their newest values since the frame before, which most often are in rows.
        """
        found = self.export(run_id, attempt=attempt, from_step=step + 1, to_step=to_step)
        frames = (frame.to_wire() for frame in found.frames())
        return self.with_newest(run_id, attempt, frames, step, to_step, own) if own else frames

    def with_newest(
        self, run_id: str, attempt: int, frames: Iterable[Frame], step: int, to_step: int | None, own: Collection[str]
    ) -> Iterator[Frame]:
        """The same of frames after `step`, which come in the order of steps."""
        visible = self._visible(run_id, attempt=attempt, from_step=step + 1, to_step=to_step)
        rows = self._series.export(self._unit, history_of(run_id), visible, own).frames()
        newest: dict[str, float] = {}
        row = next(rows, None)
        for frame in frames:
            while row is not None and row.step <= frame.step:
                newest |= row.scalars
                row = next(rows, None)
            yield replace(frame, scalars={**newest, **frame.scalars}) if newest else frame
            newest = {}

    def nearest(self, run_id: str, step: int | None, attempt: int | None) -> At | None:
        """Where the nearest frame to `step` is, or the newest one."""
        spans = self._visible(run_id, attempt=attempt)
        return self._series.nearest(self._unit, run_id, spans, NEVER if step is None else step)

    def before(self, run_id: str, at: At) -> At | None:
        """Return the place of the newest earlier frame of the attempt, or None."""
        spans = self._visible(run_id, attempt=at.attempt, to_step=at.step - 1)
        return self._series.nearest(self._unit, run_id, spans, NEVER)

    def at(self, run_id: str, at: At) -> Sequence[PastFrame]:
        """All frames that an attempt has of a step, by writer and seq."""
        return self._series.at(self._unit, {run_id: at}).get(run_id, ())

    def layers_at(self, steps: Mapping[str, At]) -> dict[str, list[Layers]]:
        """What some runs measured per layer at one step each, writer by writer; of those that have such a frame."""
        found = self._series.at(self._unit, steps, ["layers"])
        return {run_id: [frame.layers for frame in frames] for run_id, frames in found.items()}

    def seconds_at(self, run_id: str, steps: Ints) -> NDArray[np.float64]:
        """Seconds from the run's first frame to each of these steps, in a straight line between frames; else NaN."""
        return self._series.seconds_at(self._unit, run_id, self._visible(run_id), steps)

    def newest(self, run_id: str) -> Newest | None:
        """The newest frame that no later attempt hides."""
        return self._series.newest(self._unit, run_id, self._visible(run_id))

    def scalars_of(self, frame: Address) -> tuple[float, Mapping[str, float]]:
        """The time of a frame, and its scalars; 0.0 and none where it cannot be read."""
        (run_id, attempt, writer), seq, step = frame
        of_step = self._series.at(self._unit, {run_id: At(step, attempt)}, ["scalars"]).get(run_id, ())
        found = (one for one in of_step if (one.writer, one.seq) == (writer, seq))
        return next(((one.time, one.scalars) for one in found), (0.0, {}))

    def _visible(self, run_id: str, **which: Unpack[Which]) -> list[Span]:
        return visible(self._unit.connection, run_id, which)


class Added(NamedTuple):
    """What came of storing frames."""

    frames: Sequence[Frame]
    """Those that were not stored before, by seq."""
    unread: Sequence[Frame]
    """The frames that the rules have to read: the same, and more if the ledger had missed some."""
    has_others: bool
    """Whether other attempts of the run are live."""
    was_replaced: bool
    """Whether the attempt was taken for dead, and another one for its successor."""
    zoom_asked_at: float | None
    """Time of a person's request for a zoom, if the process may not have the request."""


class FrameChanges(Frames):
    """Adds frames."""

    def __init__(self, unit: Unit, series: Series[Unit], now: float, progress: RuleProgress) -> None:
        super().__init__(unit, series)
        self._summaries, self._progress = Summaries(unit.connection, now), progress

    def add_rows(self, run_id: str, attempt: int, writer: str, rows: Sequence[Rows]) -> Known:
        """Store the scalars of steps without a frame that are not stored yet, and note the newest in the summary."""
        frames = [frame for some in rows for frame in some.frames()]
        self._series.add(self._unit, Stream(history_of(run_id), attempt, writer), frames)
        losses = [(frame.step, frame.scalars["loss"]) for frame in frames if "loss" in frame.scalars]
        return self._summaries.hear_of(run_id, attempt, max(frame.step for frame in frames), max(losses, default=None))

    def add(self, run_id: str, attempt: int, writer: str, frames: Sequence[Frame]) -> Added:
        """Store the frames that are not stored yet, and note them in the summary of the run."""
        known, stream = self._summaries.of(run_id, attempt), Stream(run_id, attempt, writer)
        added, num_stored = self._series.add(self._unit, stream, frames)
        unread: Sequence[Frame] = added
        if num_stored <= known.num_frames + len(added):
            self._summaries.note(stream, known, added, num_stored)
        else:  # of some that were stored before, the ledger was not told
            self._summaries.repair(run_id, known, self.newest(run_id), num_stored)
            unread = self._unread(run_id, attempt)
        self._summaries.note_not_measured(stream, frames)
        if added:  # frames that come again may be on their way from a process that is gone
            self._summaries.hear_of_attempt(run_id, attempt, known)
        zoom = self._summaries.tell_zoom(run_id, attempt, known, is_repeated=len(added) < max(len(frames), 1))
        return Added(added, unread, known.has_others, bool(added) and known.state == "replaced", zoom)

    def _unread(self, run_id: str, attempt: int) -> list[Frame]:
        """All from the older of the two newest checkpoints on."""
        steps = self._progress.checkpoint_steps(run_id, attempt)
        return [*self.after(run_id, attempt, steps[1][0] if len(steps) > 1 else -1)]
