"""The series: frames as they are stored, and the questions about them.

`Series` is all that the rest of the store knows about an engine that keeps frames. The other modules of this package are
free of any engine (how frames are packed, and what is computed from packed ones), and `sql` is an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tsemon.wire import Frame
from tsemon_server.store.series.cells import Ints
from tsemon_server.store.series.checks import Checked, Report
from tsemon_server.store.series.exporting import Export
from tsemon_server.store.series.frames import Measured, PastFrame
from tsemon_server.store.series.metric import Metric
from tsemon_server.store.series.packing import KINDS, Kind
from tsemon_server.store.series.settling import Sizes
from tsemon_server.store.streams import Address, At, Newest, Standing, Stream, Visible

Unit = TypeVar("Unit", contravariant=True)
"""A transaction of the ledger. An engine that shares the ledger's database takes part in it; others ignore it."""

Left = Literal["fine", "coarse"]
"""The finest rollup that retention leaves."""

Shape = tuple[int, int]
"""Rows (layers) and columns (heads)."""

WINDOW_STEPS = 32
"""`Series.live` reads this many of the newest steps of an attempt: metrics measured at each tenth sample are among them."""


class Added(NamedTuple):
    """What came of storing frames."""

    frames: list[Frame]
    """Frames that were not stored before, by seq."""
    num_stored: int
    """Number of frames that the run has now."""


class Series(Protocol[Unit]):
    """The frames of all runs.

    (run, attempt, writer, seq) identifies a frame. `visible` says in which steps of which attempts a question looks.
    Whatever has settled, the answers are the same, except that a rollup keeps means in float32.
    """

    def add(self, unit: Unit, stream: Stream, frames: Sequence[Frame]) -> Added:
        """Store the frames that are not stored yet, each once, at a cost that does not grow with the run.

        Of frames with one seq the first counts. Raises InvalidFrame if a frame was altered on its way or the run would have
        too many metrics, LimitReached if the attempt would have too many writers; then nothing of `frames` is kept.
        """

    def known(self, unit: Unit, run_id: str) -> Mapping[tuple[Kind, str], Shape]:
        """Return the metrics that the run has frames of, and their largest shapes."""

    def newest(self, unit: Unit, run_id: str, visible: Visible) -> Newest | None:
        """Return the newest visible frame; None if no frame is visible. Damaged and dropped scalars are missing."""

    def live(self, unit: Unit, newest: Sequence[Address]) -> Mapping[str, Sequence[Measured]]:
        """Return what some runs measured last, by run and newest first, given the newest frame of each run.

        This is the newest frame of each writer and each set of metrics among the last WINDOW_STEPS steps of the attempt.
        """

    def at(
        self, unit: Unit, steps: Mapping[str, At], kinds: Collection[Kind] = KINDS
    ) -> Mapping[str, Sequence[PastFrame]]:
        """Return all frames of one step of each run, by writer and seq. Runs without such a frame are left out."""

    def nearest(self, unit: Unit, run_id: str, visible: Visible, step: int) -> At | None:
        """Return where the visible frame nearest to `step` is, or None.

        Of two equally near frames it is the earlier one, of several attempts the last. Frames of which retention left
        only rollups do not count.
        """

    def seconds_at(self, unit: Unit, run_id: str, visible: Visible, steps: Ints) -> NDArray[np.float64]:
        """Return the seconds from the first visible frame to each of `steps`, interpolated between frames.

        NaN if no frame can be read.
        """

    def read(
        self, unit: Unit, run_id: str, visible: Visible, kind: Kind, metric: str, entry: Shape | None = None
    ) -> Metric:
        """Return a reader of one metric. `entry` is a row and a column; without it, all are read."""

    def export(self, unit: Unit, run_id: str, visible: Visible, metrics: Collection[str] | None = None) -> Export:
        """Return a reader of whole frames, span by span, in memory that does not grow with the run."""

    def backlog(self, unit: Unit, most: int) -> int:
        """Return the number of hot frames of all runs, counted up to `most`."""

    def run_ids(self, unit: Unit) -> Iterable[tuple[str, str]]:
        """Return the tables in which the engine holds rows, each with the id of a run."""

    def settle(
        self,
        standing: Callable[[Collection[str]], Mapping[str, Standing]],
        now: float,
        sizes: Sizes,
        is_stopped: Callable[[], bool],
    ) -> int:
        """Pack hot frames that have settled, until none is left or `is_stopped`; the number of segments.

        `standing` tells how runs stand; a run that it leaves out is deleted. A stream's only hot frame stays. This may run
        beside anything, also beside itself in another process, and may be killed at any point.
        """

    def reduce(
        self,
        left: Left,
        settled_before: float,
        of: Callable[[Collection[str]], Collection[str]],
        is_stopped: Callable[[], bool],
    ) -> bool:
        """Drop what is finer than `left` of segments that settled before; True if there was anything to drop.

        `of` selects, from the runs that have such segments, those that are meant.
        """

    def drop(self, run_id: str, is_stopped: Callable[[], bool]) -> bool:
        """Remove all that is held of a run, slice by slice; False if stopped before the end.

        The id of a run is never used again.
        """

    def check(self, run_id: str, report: Report) -> Checked:
        """Recount the frames of a run, and report damage. Reads only."""
