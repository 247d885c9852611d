"""What the store is to be: frames in a dict, and every answer by its definition. Slow, and short enough to be seen right."""

import math
from fractions import Fraction

import pytest

from tsemon_server.store.ledger.attempts import HEARD_S, LEASE_S

SHAPES = {"scalars": lambda _: (1, 1), "layers": lambda array: (*array.shape, 1), "heads": lambda array: array.shape}


class NaiveRun:
    """A run: attempts, and frames by (attempt, writer, seq)."""

    def __init__(self, clock):
        self.clock = clock
        self.state = "running"
        self.states = {}
        self.heard_at = {}
        self.keys = {}
        self.hidden_from = {}
        self.depths = {}
        self.frames = {}
        self.newest = None
        self.losses = {None}  # several where the store may choose

    # What writers do

    def finish(self):
        self.states[len(self.states)] = "finished"
        self.state = "running" if any(map(self.is_live, self.states)) else "finished"

    def is_live(self, attempt):
        return self.states[attempt] == "running" and self.heard_at[attempt] >= self.clock() - LEASE_S - HEARD_S

    def hear_of(self, attempt):
        if self.states[attempt] == "replaced":
            self.state = "running"
        if self.states[attempt] != "finished":
            self.states[attempt], self.heard_at[attempt] = "running", self.clock()

    def register(self, depth, resume_step, key):
        if key in self.keys:
            return self.keys[key]
        start, attempt = resume_step or 0, len(self.depths) + 1
        self.hidden_from = {earlier: min(start, hidden) for earlier, hidden in self.hidden_from.items()}
        self.hidden_from[attempt], self.depths[attempt] = math.inf, depth
        silent = [earlier for earlier, state in self.states.items() if state == "running" and not self.is_live(earlier)]
        self.states |= dict.fromkeys(silent, "replaced")
        self.states[attempt], self.heard_at[attempt], self.state = "running", self.clock(), "running"
        if key is not None:
            self.keys[key] = attempt
        visible = [(frame.step, at[0], at[2], at[1]) for at, frame in self.frames.items() if self._is_visible(at)]
        self.newest, self.losses = None, {None}
        if visible:
            step, *at = max(visible)
            self.newest = (at[0], at[2], at[1])
            # A writer may have sent the step twice.
            same = [f for (a, w, _), f in self.frames.items() if (f.step, a, w) == (step, at[0], at[2])]
            self.losses = {repr(f.scalars["loss"]) if "loss" in f.scalars else None for f in same}
        return attempt

    def add(self, attempt, writer, frames):
        """The seqs that are new, in order."""
        added = {}
        for frame in frames:
            at = (attempt, writer, frame.seq)
            if at not in self.frames:
                self.frames[at] = added[at] = frame
        if added:
            self.hear_of(attempt)
        visible = [(frame.step, at) for at, frame in added.items() if self._is_visible(at)]
        if visible and (self.newest is None or max(visible)[0] >= self.last_step):
            self.newest = max(visible)[1]
            if "loss" in self.frames[self.newest].scalars:
                self.losses = {repr(self.frames[self.newest].scalars["loss"])}
        return sorted(seq for _, _, seq in added)

    def add_unnoted(self, attempt, writer, frames):
        """The series keeps them, and the ledger finds the newest of all once it has missed any."""
        num_before = len(self.frames)
        for frame in frames:
            self.frames.setdefault((attempt, writer, frame.seq), frame)
        visible = [(frame.step, at[0], at[2], at[1]) for at, frame in self.frames.items() if self._is_visible(at)]
        if len(self.frames) > num_before and visible:
            _, of_attempt, seq, of_writer = max(visible)
            self.newest = (of_attempt, of_writer, seq)
            if "loss" in self.frames[self.newest].scalars:
                self.losses = {repr(self.frames[self.newest].scalars["loss"])}

    # What is asked

    @property
    def last_step(self):
        return self.frames[self.newest].step if self.newest else None

    def check_detail(self, found):
        assert (found["state"], found["attempt"], found["num_blocks"]) == (self.state, *[*self.depths.items()][-1])
        assert (found["num_frames"], found["last_step"]) == (len(self.frames), self.last_step)
        assert found["loss"] in {None if loss is None else finite(float(loss)) for loss in self.losses}
        shapes = self.shapes()
        assert found["metrics"]["scalars"] == sorted(metric for kind, metric in shapes if kind == "scalars")
        layers = {metric: num_rows for (kind, metric), (num_rows, _) in shapes.items() if kind == "layers"}
        heads = {metric: shape for (kind, metric), shape in shapes.items() if kind == "heads"}
        assert found["metrics"]["layers"] == layers
        assert {metric: tuple(shape) for metric, shape in found["metrics"]["heads"].items()} == heads
        self._check_latest(found["latest"])

    def _check_latest(self, found):
        if self.newest is None:
            assert found is None
            return
        # A writer that sends a step twice has two frames which the store can tell apart only while they are hot.
        attempt, writer, _ = self.newest
        same = [
            frame for at, frame in self.frames.items() if at[:2] == (attempt, writer) and frame.step == self.last_step
        ]
        assert found["step"] == self.last_step
        assert found["time"] == self.frames[self.newest].time
        for name in {*found["scalars"], *self.frames[self.newest].scalars}:
            values = [finite(frame.scalars[name]) for frame in same if name in frame.scalars]
            assert found["scalars"][name] in values

    def shapes(self):
        """Per kind and metric the largest number of rows and columns."""
        shapes = {}
        for frame in self.frames.values():
            for kind, shape_of in SHAPES.items():
                for metric, value in getattr(frame, kind).items():
                    known = shapes.setdefault((kind, metric), shape_of(value))
                    shapes[kind, metric] = tuple(map(max, known, shape_of(value)))
        return shapes

    def samples(self, kind, metric, *, from_step=None, to_step=None, attempt=None):
        """Steps and values of all rows and columns with their shape, in the order of steps."""
        for at, frame in sorted(self.frames.items(), key=lambda item: (item[1].step, item[0])):
            is_visible = self._is_visible(at) if attempt is None else at[0] == attempt
            if is_visible and (from_step or 0) <= frame.step <= (math.inf if to_step is None else to_step):
                value = getattr(frame, kind).get(metric)
                if value is not None:
                    shape = SHAPES[kind](value)
                    if 0 not in shape:
                        yield frame.step, shape, [value] if kind == "scalars" else value.tolist()

    def check_samples(self, found, kind, metric, **where):
        steps, values, num_damaged = found
        expected = [(step, values) for step, _, values in self.samples(kind, metric, **where)]
        width = max((len(values) for _, values in expected), default=0)
        padded = [(step, repr(values + [math.nan] * (width - len(values)))) for step, values in expected]
        assert num_damaged == 0
        assert steps.tolist() == [step for step, _ in expected]
        assert sorted(zip(steps.tolist(), map(repr, values.tolist()), strict=True)) == sorted(padded)

    def check_series(self, found, kind, metric, *, layer=None, head=None, points, **where):
        row, column = layer or 0, head or 0
        samples = [
            (step, values[row * num_columns + column])
            for step, (num_rows, num_columns), values in self.samples(kind, metric, **where)
            if row < num_rows and column < num_columns
        ]
        buckets = list(buckets_of(samples, points, ends_alone=True))
        assert len(buckets) <= points
        assert found["damaged"] == 0
        assert found["step"] == [middle(bucket) for bucket in buckets]
        assert found["nonfinite"] == [sum(not math.isfinite(value) for _, value in bucket) for bucket in buckets]
        for number, bucket in enumerate(buckets):
            least, mean, most = summary([value for _, value in bucket], is_float32=kind != "scalars")
            assert found["min"][number] == least
            assert found["mean"][number] == mean
            assert found["max"][number] == most
            assert least is None or least <= found["mean"][number] <= most

    def check_heatmap(self, found, metric, *, columns, **where):
        samples = [(step, values) for step, _, values in self.samples("layers", metric, **where)]
        width = max((len(values) for _, values in samples), default=found["layers"])
        buckets = list(buckets_of(samples, columns, ends_alone=False))
        assert len(buckets) <= columns
        assert (found["damaged"], found["layers"]) == (0, width)
        assert found["step"] == [middle(bucket) for bucket in buckets]
        assert found["samples"] == [len(bucket) for bucket in buckets]
        for column, bucket in zip(found["values"], buckets, strict=True):
            assert len(column) == width
            for layer, value in enumerate(column):
                assert value == summary([row[layer] for _, row in bucket if layer < len(row)], is_float32=True)[1]

    def _is_visible(self, at):
        return self.frames[at].step < self.hidden_from[at[0]]


def buckets_of(samples, most, *, ends_alone):
    """Samples of one span of 2**shift steps, for the smallest shift that makes few enough spans."""
    if not samples:
        return
    first, last, shift = samples[0][0], samples[-1][0], 0
    while len(samples) > most and (last >> shift) - (first >> shift) >= most - 2 * ends_alone:
        shift += 1
    groups = {}
    for step, value in samples:
        key = (step >> shift, ends_alone and step == last, ends_alone and step != first)
        groups.setdefault(key, []).append((step, value))
    for _, group in sorted(groups.items()):
        yield group


def middle(bucket):
    return (bucket[0][0] + bucket[-1][0]) // 2


def summary(values, *, is_float32):
    """Least, mean and largest finite value, or three times None.

    Rollups keep the means of float32 values in float32: each of them, and so their mean, is off by at most half of the
    last of 24 bits of the largest value, or of the smallest number there is. Float64 has 29 bits more, of which adding
    up may cost some.
    """
    kept = [value for value in values if math.isfinite(value)]
    if not kept:
        return None, None, None
    mean, largest = float(sum(map(Fraction, kept)) / len(kept)), max(map(abs, kept))
    error = 2.0**-24 * largest + 2.0**-150 if is_float32 else 2.0**-46 * largest
    return min(kept), pytest.approx(mean, rel=0, abs=error * (1 + 2.0**-20)), max(kept)


def finite(value):
    return value if math.isfinite(value) else None
