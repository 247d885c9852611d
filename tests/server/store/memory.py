"""An engine for frames in dicts and numpy, as short as it can be: each answer by its definition.

It commits at once and by itself, as an engine does that does not share the ledger's database. Nothing of it is packed:
frames that have settled know their segment, and what retention has left of that.
"""

import math
from collections import defaultdict
from functools import cached_property
from itertools import groupby
from types import SimpleNamespace

import numpy as np

from tsemon.errors import InvalidFrame, LimitReached
from tsemon.wire import MAX_WRITERS, crc_of
from tsemon_server.store.series import WINDOW_STEPS, Added
from tsemon_server.store.series.cells import Cells
from tsemon_server.store.series.checks import Checked
from tsemon_server.store.series.exporting import Piece
from tsemon_server.store.series.frames import PastFrame, measured
from tsemon_server.store.series.metric import Points, Samples, shift_of
from tsemon_server.store.streams import At, Newest, Stream

KINDS = ("scalars", "layers", "heads")
BITS = {"samples": None, "fine": 4, "coarse": 7}
"""How many samples make a cell of what retention has left."""


class MemorySeries:
    def __init__(self):
        self.frames = {}
        """By stream and seq."""
        self.segments = {}
        """The segment of a frame that has settled: when that was, and what is left of it."""

    def add(self, unit, stream, frames):
        writers = {of.writer for of, _ in self.frames if of[:2] == stream[:2]}
        if frames and len(writers | {stream.writer}) > MAX_WRITERS:
            raise LimitReached(f"the attempt has {MAX_WRITERS} writers")
        if any(frame.crc not in (None, crc_of(frame)) for frame in frames):
            raise InvalidFrame("a frame was altered on its way")
        new = {}
        for frame in frames:
            if (stream, frame.seq) not in self.frames:
                new[frame.seq] = frame
                self.frames[stream, frame.seq] = _stored(stream, frame)
        return Added([new[seq] for seq in sorted(new)], sum(of.run_id == stream.run_id for of, _ in self.frames))

    def known(self, unit, run_id):
        shapes = {}
        for frame in (frame for (of, _), frame in self.frames.items() if of.run_id == run_id):
            for kind, metric, values in _values(frame):
                shapes[kind, metric] = tuple(map(max, values.shape, shapes.get((kind, metric), (0, 0))))
        return dict(sorted(shapes.items()))

    def newest(self, unit, run_id, visible):
        frames = self.visible(run_id, visible, ("samples", "fine", "coarse"))
        found = max(frames, key=lambda f: (f.step, f.attempt, f.seq, f.writer), default=None)
        if found is None:
            return None
        left = self.left(Stream(run_id, found.attempt, found.writer), found.seq)
        scalars = found.scalars if left == "samples" else {}
        return Newest(found.step, found.attempt, found.seq, found.writer, found.time, scalars)

    def live(self, unit, newest):
        found = {}
        for (run_id, attempt, _), _, step in newest:
            frames = sorted(self.visible(run_id, [(attempt, 0, step)]), key=lambda f: (f.step, f.seq, f.writer))
            steps = sorted({frame.step for frame in frames})[-WINDOW_STEPS:]
            of_layout = {(f.writer, _layout(f)): f for f in frames if f.step in steps}
            order = [frame for frame in reversed(frames) if of_layout.get((frame.writer, _layout(frame))) is frame]
            found[run_id] = [measured(frame) for frame in order]
        return found

    def at(self, unit, steps, kinds=KINDS):
        found = {}
        for run_id, (step, attempt) in steps.items():
            frames = sorted(self.visible(run_id, [(attempt, step, step)]), key=lambda f: (f.writer, f.seq))
            found[run_id] = [f._replace(**{kind: {} for kind in KINDS if kind not in kinds}) for f in frames]
        return {run_id: frames for run_id, frames in found.items() if frames}

    def nearest(self, unit, run_id, visible, step):
        places = {At(frame.step, frame.attempt) for frame in self.visible(run_id, visible)}
        return min(places, key=lambda at: (abs(at.step - step), at.step, -at.attempt), default=None)

    def seconds_at(self, unit, run_id, visible, steps):
        frames = sorted(self.visible(run_id, visible, BITS), key=lambda frame: frame.step)
        if not frames:
            return np.full(len(steps), np.nan)
        return np.interp(steps, [f.step for f in frames], [f.time for f in frames]) - frames[0].time

    def read(self, unit, run_id, visible, kind, metric, entry=None):
        return Metric(self, run_id, visible, kind, metric, entry)

    def export(self, unit, run_id, visible, metrics=None):
        return Export(self, run_id, visible, metrics)

    def backlog(self, unit, most):
        return min(most, len(self.frames) - len(self.segments))

    def run_ids(self, unit):
        return {("frames", stream.run_id) for stream, _ in self.frames}

    # What housekeeping does

    def settle(self, standing, now, sizes, is_stopped):
        num_done = 0
        for stream in sorted({stream for stream, _ in self.frames}):
            stands = standing([stream.run_id]).get(stream.run_id)
            if stands is None:
                continue
            hot = sorted(seq for of, seq in self.frames if of == stream and (of, seq) not in self.segments)
            is_over = stands.is_over or stream.attempt not in stands.attempts
            num = math.ceil(len(hot) / sizes.segment) if is_over else (len(hot) - sizes.kept) // sizes.segment
            may_go = [seq for seq in hot if stands.newest is None or (stream, seq) != stands.newest[:2]]
            for number in range(num if len(hot) > 1 else 0):
                seqs = may_go[number * sizes.segment : (number + 1) * sizes.segment]
                if not seqs or is_stopped():
                    break
                segment = SimpleNamespace(settled_at=now, left="samples")
                self.segments |= {(stream, seq): segment for seq in seqs}
                num_done += 1
        return num_done

    def reduce(self, left, settled_before, of, is_stopped):
        aged = {
            id(segment): (stream.run_id, segment)
            for (stream, _), segment in self.segments.items()
            if [*BITS].index(segment.left) < [*BITS].index(left) and segment.settled_at < settled_before
        }
        wanted = {*of({run_id for run_id, _ in aged.values()})}
        for run_id, segment in aged.values():
            if run_id in wanted and not is_stopped():
                segment.left = left
        return bool(wanted)

    def drop(self, run_id, is_stopped):
        if not is_stopped():
            self.frames, self.segments = (
                {at: what for at, what in known.items() if at[0].run_id != run_id}
                for known in (self.frames, self.segments)
            )
        return not is_stopped()

    def check(self, run_id, report):
        settled = [segment for (of, _), segment in self.segments.items() if of.run_id == run_id]
        num_frames = sum(of.run_id == run_id for of, _ in self.frames)
        return Checked(run_id, num_frames - len(settled), len(settled), len({*map(id, settled)}), 0)

    # What all of this is made of

    def left(self, stream, seq):
        segment = self.segments.get((stream, seq))
        return "samples" if segment is None else segment.left

    def visible(self, run_id, visible, left=("samples",)):
        """Visible frames of which this is left, in no order."""
        return [
            frame
            for (stream, seq), frame in self.frames.items()
            if stream.run_id == run_id
            and self.left(stream, seq) in left
            and any(stream.attempt == of and first <= frame.step <= last for of, first, last in visible)
        ]


class Metric:
    def __init__(self, series, run_id, visible, kind, metric, entry):
        self._series, self._run_id, self._visible = series, run_id, visible
        self._key, self._entry = (kind, metric), entry
        self._type = "<f8" if kind == "scalars" else "<f4"

    def samples(self):
        found = self._of(self._series.visible(self._run_id, self._visible))
        width = max((len(values) for _, values, _ in found), default=1)
        rows = [[*values, *[math.nan] * (width - len(values))] for _, values, _ in found]
        steps = np.array([step for step, *_ in found], np.int64)
        return Samples(steps, np.array(rows, self._type).reshape(len(found), width))

    def extent(self):
        spans = self._cells.spans
        return (int(spans[0, 0]), int(spans[:, 1].max()), int(spans[:, 2].sum())) if len(spans) else None

    def points(self, most, *, ends_alone, shift=None):
        extent = self.extent()
        if extent is not None and shift is None:
            shift = shift_of(extent, most, ends_alone=ends_alone)
        return Points(self._cells, shift or 0)

    def num_rows(self):
        (row, column), frames = self._entry or (0, 0), self._series.visible(self._run_id, self._visible, BITS)
        shapes = [values.shape for frame in frames for *key, values in _values(frame) if tuple(key) == self._key]
        return max((rows for rows, columns in shapes if rows > row and columns > column), default=0)

    def _of(self, frames):
        """Steps, values and shapes of these, by step, as far as they have the entry."""
        (row, column), found = self._entry or (0, 0), []
        for frame in frames:
            for *key, values in _values(frame):
                if tuple(key) == self._key and values.shape[0] > row and values.shape[1] > column:
                    wanted = values if self._entry is None else values[row, column]
                    found.append((frame.step, wanted.ravel().tolist(), values.shape))
        return sorted(found, key=lambda sample: sample[0])

    @cached_property
    def _cells(self):
        cells = [
            ((step, step, 1), [_summary([value]) for value in values])
            for step, values in zip(*self.samples()[:2], strict=True)
        ]
        cells = sorted([*cells, *self._rollups()], key=lambda cell: cell[0][0])
        width = max((len(stats) for _, stats in cells), default=1)
        padded = [[*stats, *[(math.nan, math.nan, math.nan, 0)] * (width - len(stats))] for _, stats in cells]
        spans = np.array([span for span, _ in cells], np.int64).reshape(-1, 3)
        return Cells(spans, np.array(padded, "<f8").reshape(-1, width, 4))

    def _rollups(self):
        """Of what was reduced, in one shape each; those that are visible as a whole."""
        groups = defaultdict(list)
        for (stream, seq), frame in self._series.frames.items():
            if stream.run_id == self._run_id and self._series.left(stream, seq) != "samples":
                for step, values, shape in self._of([frame]):
                    segment = self._series.segments[stream, seq]
                    groups[id(segment), stream.attempt, segment.left, shape].append((step, values))
        for (_, attempt, left, _), samples in groups.items():
            samples.sort(key=lambda sample: sample[0])
            gap = (samples[-1][0] - samples[0][0] + 1) / len(samples)
            shift = max(0, round(math.log2(gap))) + BITS[left]
            for _, cell in groupby(samples, key=lambda sample, shift=shift: sample[0] >> shift):
                steps, values = zip(*cell, strict=True)
                if any(of == attempt and first <= steps[0] and steps[-1] <= last for of, first, last in self._visible):
                    yield (
                        (steps[0], steps[-1], len(steps)),
                        [_summary(of_entry) for of_entry in zip(*values, strict=True)],
                    )


class Export:
    def __init__(self, series, run_id, visible, metrics):
        self._series, self._run_id, self._visible, self._metrics = series, run_id, visible, metrics
        reduced = series.visible(run_id, visible, ("fine", "coarse"))
        self.num_dropped, self.num_damaged = sum(len([*_values(frame)]) for frame in reduced), 0

    def frames(self):
        for span in self._visible:
            yield from sorted(
                self._series.visible(self._run_id, [span]), key=lambda frame: (frame.step, frame.writer, frame.seq)
            )

    def pieces(self):
        for span in self._visible:
            groups = defaultdict(list)
            for frame in sorted(self._series.visible(self._run_id, [span]), key=lambda f: (f.writer, f.step, f.seq)):
                for kind, metric, values in _values(frame):
                    if (self._metrics is None or metric in self._metrics) and values.size:
                        groups[frame.writer, kind, metric, values.shape].append((frame, values.ravel()))
            for (writer, kind, metric, shape), some in groups.items():
                parts = [np.array([getattr(frame, name) for frame, _ in some]) for name in ("seq", "step", "time")]
                stream = Stream(self._run_id, span[0], writer)
                yield Piece(stream, kind, metric, shape[1], *parts, np.array([values for _, values in some]))


def _stored(stream, frame):
    layers, heads = (
        {name: np.frombuffer(array.data, "<f4").reshape(array.shape) for name, array in arrays.items()}
        for arrays in (frame.layers, frame.heads)
    )
    return PastFrame(stream.attempt, stream.writer, frame.seq, frame.step, frame.time, frame.scalars, layers, heads)


def _values(frame):
    """Kind, metric and values as rows and columns."""
    for kind in KINDS:
        for metric, value in sorted(getattr(frame, kind).items()):
            grid = np.atleast_1d(value)
            yield kind, metric, grid if grid.ndim == 2 else grid[:, None]


def _layout(frame):
    return tuple((kind, metric, values.shape) for kind, metric, values in _values(frame))


def _summary(values):
    kept = [value for value in values if math.isfinite(value)]
    if not kept:
        return math.nan, math.nan, math.nan, 0
    return min(kept), math.fsum(value / len(kept) for value in kept), max(kept), len(kept)
