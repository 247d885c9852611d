"""Recorded trainings in files of JSON lines."""

import gzip
import json
import math

import numpy as np
import pytest

from tsemon.errors import InvalidRecording
from tsemon_server.services.replay.traces import Trace

RUN = {"t": "run", "format": "tsemon-trace/1", "name": "lm", "frozen_blocks": [-1, 0, 2]}
LOSS = {"t": "loss", "loss": [4.0, 3.0, None, 2.0, 1.0, 6.0], "first_step": 0}
END = {"t": "end", "steps": 6}


def frame(step, **more):
    return {"t": "frame", "step": step, "scalars": {"loss": 1.0}, "layers": {}} | more


def lines_of(*entries):
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


@pytest.fixture
def write(tmp_path):
    def write(*entries, name="lm.jsonl"):
        path = tmp_path / name
        path.write_bytes(entries[0] if isinstance(entries[0], bytes) else lines_of(*entries))
        return path

    return write


def read(path):
    trace = Trace(path)
    (attempt,) = trace.attempts()
    return [*attempt.views], trace.problems


class TestATrace:
    def test_gives_its_frames_in_order(self, write):
        views, problems = read(write(RUN, frame(0), frame(5), END))
        assert ([view.step for view in views], problems) == ([0, 5], [])

    def test_is_read_gzipped_or_plain_whatever_its_name(self, write):
        text = lines_of(RUN, frame(0), END)
        assert len(read(write(text, name="a.jsonl.gz"))[0]) == 1
        assert len(read(write(gzip.compress(text), name="b.jsonl"))[0]) == 1

    def test_has_the_name_in_its_header(self, write):
        assert Trace(write(RUN, END, name="other.jsonl")).name == "lm"

    def test_reads_null_as_nan(self, write):
        ((view,), _) = read(write(RUN, frame(0, scalars={"x": None}, layers={"y": [1.0, None]}), END))
        assert math.isnan(view.scalars["x"])
        assert np.isnan(view.layers["y"]).tolist() == [False, True]

    def test_has_arrays_as_they_are_on_the_wire(self, write):
        ((view,), _) = read(write(RUN, frame(0, layers={"y": [0.1, 1e300]}, heads={"z": [[0.1, 2], [3, 4]]}), END))
        assert view.layers["y"].tolist() == [float(np.float32(0.1)), math.inf]
        assert (view.heads["z"].dtype, view.heads["z"].shape) == (np.float32, (2, 2))

    def test_knows_which_blocks_are_frozen_on_purpose_and_leaves_the_embedding_out(self, write):
        ((view,), _) = read(write(RUN, frame(0), END))
        assert view.frozen == {0, 2}


class TestTheLossesOfATrace:
    @pytest.fixture
    def views(self, write):
        return {view.step: view.scalars for view in read(write(RUN, LOSS, frame(0), frame(3), frame(5), END))[0]}

    def test_are_those_since_the_last_frame_this_one_included(self, views):
        summed_up = [(s["loss_min"], s["loss_max"], s["loss_mean"]) for s in views.values()]
        assert summed_up == [(4.0, 4.0, 4.0), (2.0, 3.0, 2.5), (1.0, 6.0, 3.5)]

    def test_spread_as_the_losses_do(self, views):
        assert [s["loss_std"] for s in views.values()] == [0.0, 0.5, 2.5]

    def test_are_counted_where_they_are_not_finite(self, views):
        assert [s["loss_nonfinite"] for s in views.values()] == [0.0, 1.0, 0.0]

    def test_leave_the_loss_of_the_frame_alone(self, views):
        assert [s["loss"] for s in views.values()] == [1.0, 1.0, 1.0]

    def test_are_undefined_where_none_is_finite(self, write):
        ((view,), _) = read(write(RUN, LOSS | {"loss": [None]}, frame(0), END))
        assert math.isnan(view.scalars["loss_mean"])
        assert math.isnan(view.scalars["loss_std"])
        assert view.scalars["loss_nonfinite"] == 1.0

    def test_begin_where_they_say(self, write):
        views, _ = read(write(RUN, LOSS | {"first_step": 100}, frame(99), frame(101), END))
        assert "loss_mean" not in views[0].scalars
        assert views[1].scalars["loss_mean"] == 3.5

    def test_may_be_missing(self, write):
        ((view,), problems) = read(write(RUN, frame(0), END))
        assert (view.scalars, problems) == ({"loss": 1.0}, [])


class TestWhatIsNoTrace:
    @pytest.mark.parametrize(
        ("entries", "text"),
        [
            ([frame(0)], "line 1: expected a `run` line first"),
            ([RUN | {"format": "tsemon-trace/2"}], r"line 1: run\.format: .*'tsemon-trace/1'"),
            ([RUN, {"t": "picture"}], 'line 2: expected "t" to be run, loss, frame or end'),
            ([RUN, ["t"]], "line 2: Input should be an object"),
            ([RUN, {"t": "frame"}], r"line 2: frame\.step: Field required"),
            ([RUN, frame("5")], r"line 2: frame\.step: Input should be a valid integer"),
            ([RUN, frame(0, layers={"x": ["1"]})], r"line 2: frame\.layers\.x\.0: Input should be a valid number"),
            ([RUN, frame(0, heads={"x": [[1], [1, 2]]})], "line 2: expected as many heads in each block"),
            ([RUN, frame(5), frame(5)], "line 3: expected a step after 5, got 5"),
            ([b""], "line 1: expected a `run` line first"),
            ([b"step,loss\n0,4.1\n"], "line 1: Invalid JSON"),
            ([lines_of(RUN, frame(0)) + b"{\n" + lines_of(END)], "line 3: Invalid JSON"),
            ([gzip.compress(b"x")[:5]], "line 1: expected JSON lines, gzipped or plain"),
        ],
    )
    def test_is_refused_with_the_line_and_what_was_expected(self, entries, text, write):
        path = write(*entries)
        with pytest.raises(InvalidRecording, match=text) as refusal:
            read(path)
        assert str(refusal.value).startswith(str(path))


class TestATraceThatBreaksOff:
    def test_gives_what_was_written_whole_and_says_so(self, write):
        views, problems = read(write(lines_of(RUN, frame(0), frame(5), frame(10))[:-9]))
        assert [view.step for view in views] == [0, 5]
        assert "breaks off in line 4" in problems[0]

    def test_gives_what_can_be_unpacked_and_says_so(self, write):
        noise = np.random.default_rng(0).normal(size=(400, 20)).tolist()
        whole = gzip.compress(lines_of(RUN, *(frame(step, layers={"x": x}) for step, x in enumerate(noise)), END))
        views, problems = read(write(whole[: len(whole) // 2]))
        assert 100 < len(views) < 300
        assert [view.step for view in views] == [*range(len(views))]
        assert "breaks off" in problems[0]

    def test_is_told_from_one_that_was_recorded_to_its_end(self, write):
        views, (problem,) = read(write(RUN, frame(0), frame(5)))
        assert len(views) == 2
        assert "no `end` line: it was read up to step 5" in problem
