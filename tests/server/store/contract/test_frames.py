"""Whole frames: each is stored once, and given back as it came."""

import json
import random
import tracemalloc
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest

from tests.server.conftest import layer_frame, loss_frame
from tests.server.frames import frames_of_a_long_run
from tsemon.errors import InvalidFrame, UnknownRun
from tsemon.wire import Array, Frame, crc_of
from tsemon_server.store.ledger.retention import Retention
from tsemon_server.store.series.settling import Sizes
from tsemon_server.store.streams import At


@pytest.fixture(params=["hot", "settled", "both"])
def settle(request, bench):
    """Pack none, all but the newest, or some of the frames."""
    sizes = {"hot": Sizes(10**6, 10**6), "settled": Sizes(50, 0), "both": Sizes(50, 70)}[request.param]
    return lambda: bench.store.settle(sizes=sizes)


def in_order(bench, run_id, **where):
    with bench.store.read() as reader:
        return list(reader.frames.export(run_id, **where).frames())


def exactly(frames):
    """What frames of either kind hold; arrays to the last bit, and NaN is equal to itself."""
    return [json.loads((f if isinstance(f, Frame) else f.to_wire()).to_json()) for f in frames]


def values_of(pieces):
    """{(attempt, writer, seq, step, time, metric, index): value}"""
    return {
        (*piece.stream[1:], *about, piece.metric, piece.kind, index): repr(value)
        for piece in pieces
        for *about, values in zip(*(part.tolist() for part in piece[4:]), strict=True)
        for index, value in enumerate(values)
    }


def written_out(frames, attempt=1, writer="w"):
    """The same of frames."""
    for frame in frames:
        about = (attempt, writer, frame.seq, frame.step, frame.time)
        for kind in ("scalars", "layers", "heads"):
            for metric, value in getattr(frame, kind).items():
                for index, item in enumerate([value] if kind == "scalars" else value.tolist()):
                    yield (*about, metric, kind, index), repr(item)


class TestAFrame:
    def test_is_stored_once_however_often_it_is_sent(self, bench, settle):
        run_id, frames = bench.register(), [loss_frame(step) for step in range(120)]
        assert bench.send(run_id, [*frames, *frames[:7]]) == 120
        settle()
        assert bench.send(run_id, frames[::-1]) == 0
        assert bench.send(run_id, frames, writer="other") == 120
        assert bench.detail(run_id)["num_frames"] == 240

    def test_is_the_first_of_those_with_its_number(self, bench):
        run_id = bench.register()
        bench.send(run_id, [loss_frame(1, 5.0), loss_frame(1, 6.0)])
        bench.send(run_id, [loss_frame(1, 7.0)])
        assert bench.losses(run_id) == {1: 5.0}

    def test_that_was_altered_on_its_way_is_refused(self, bench):
        run_id, frame = bench.register(), loss_frame(3)
        with pytest.raises(InvalidFrame):
            bench.send(run_id, [loss_frame(2), replace(frame, crc=crc_of(frame) ^ 1)])
        assert bench.send(run_id, [replace(frame, crc=crc_of(frame))]) == 1
        assert bench.losses(run_id) == {3: 1.0}

    def test_of_a_run_that_is_not_there_is_refused(self, bench):
        with pytest.raises(UnknownRun):
            bench.send("nope", [loss_frame(0)])

    def test_is_nearest_to_a_step_where_no_later_attempt_hides_it(self, bench, settle):
        run_id = bench.register()
        bench.send(run_id, [loss_frame(step) for step in range(0, 1000, 10)])
        bench.register(resume_step=500)
        bench.send(run_id, [loss_frame(step, seq=step) for step in (490, 600)], attempt=2)
        settle()

        def nearest(step, attempt=None):
            with bench.store.read() as reader:
                return reader.frames.nearest(run_id, step, attempt)

        asked = {4: (0, 1), 5: (0, 1), 6: (10, 1), 490: (490, 2), 544: (490, 2), 546: (600, 2), None: (600, 2)}
        assert {step: nearest(step) for step in asked} == {step: At(*at) for step, at in asked.items()}
        assert (nearest(970, 1), nearest(0, 2), nearest(7, 3)) == (At(970, 1), At(490, 2), None)
        with bench.store.read() as reader:
            before = {at: reader.frames.before(run_id, At(*at)) for at in ((600, 2), (490, 2), (480, 1), (0, 1))}
        assert before == {(600, 2): At(490, 2), (490, 2): None, (480, 1): At(470, 1), (0, 1): None}

    def test_is_read_with_all_others_of_its_step(self, bench, settle):
        runs = [bench.register(name) for name in "ab"]
        for run_id in runs:
            for writer in ("stage1", "stage0"):
                bench.send(run_id, [layer_frame(step, [step, 0, 0]) for step in range(60)], writer=writer)
        settle()
        with bench.store.read() as reader:
            found = reader.frames.layers_at({runs[0]: At(7, 1), runs[1]: At(59, 1), "gone": At(1, 1)})
            of_step = reader.frames.at(runs[0], At(7, 1))
        assert {run_id: [layers["token_similarity"][0] for layers in of] for run_id, of in found.items()} == {
            runs[0]: [7, 7],
            runs[1]: [59, 59],
        }
        assert [(frame.writer, frame.seq, frame.time) for frame in of_step] == [
            ("stage0", 7, 1007.0),
            ("stage1", 7, 1007.0),
        ]

    def test_has_a_time_between_those_of_its_neighbours(self, bench, settle):
        run_id = bench.register()
        bench.send(run_id, [Frame(step, 10 * step, 100.0 + 3 * step, {"loss": 1.0}) for step in range(200)])
        settle()
        with bench.store.read() as reader:
            seconds = reader.frames.seconds_at(run_id, np.array([0, 15, 1000, 1990, 5000]))
            assert np.isnan(reader.frames.seconds_at(bench.register("none"), np.array([0]))).all()
        np.testing.assert_allclose(seconds, [0, 4.5, 300, 597, 597])


class TestFramesInOrder:
    def test_are_those_that_were_sent_to_the_last_bit(self, bench, settle):
        run_id, sent = bench.register(), [*frames_of_a_long_run(300)]
        bench.fill(run_id, sent)
        settle()
        assert exactly(in_order(bench, run_id)) == exactly(sent)

    def test_come_by_step_however_they_came(self, bench, settle):
        run_id, steps = bench.register(), [*range(300)]
        random.Random(0).shuffle(steps)
        for start in range(0, 300, 30):
            frames = [loss_frame(step, float(step), seq=start + i) for i, step in enumerate(steps[start : start + 30])]
            bench.send(run_id, frames)
            settle()
        found = in_order(bench, run_id)
        assert [(frame.step, frame.scalars["loss"]) for frame in found] == [(step, float(step)) for step in range(300)]

    def test_of_one_step_come_by_writer_and_seq(self, bench, settle):
        run_id = bench.register()
        for writer in ("b", "a"):
            bench.send(run_id, [loss_frame(step // 2, seq=step) for step in range(120)], writer=writer)
            settle()
        found = [(frame.step, frame.writer, frame.seq) for frame in in_order(bench, run_id)]
        assert found == [(step, writer, 2 * step + i) for step in range(60) for writer in "ab" for i in (0, 1)]

    def test_are_those_that_no_later_attempt_hides_or_all_of_one(self, bench, settle):
        run_id = bench.register()
        bench.send(run_id, [loss_frame(step, 1.0) for step in range(100)])
        bench.register(resume_step=60)
        bench.send(run_id, [loss_frame(step, 2.0) for step in range(60, 160)], attempt=2)
        settle()
        told = lambda **where: [(f.attempt, f.step) for f in in_order(bench, run_id, **where)]  # noqa: E731
        first, second = ([(1, step) for step in range(100)], [(2, step) for step in range(60, 160)])
        assert told() == first[:60] + second
        assert told(attempt=1) == first
        assert told(attempt=2) == second
        assert told(attempt=1, from_step=40, to_step=70) == first[40:71]

    def test_include_frames_without_any_value(self, bench, settle):
        run_id = bench.register()
        bench.send(run_id, [loss_frame(step) if step % 2 else Frame(step, step, 1.0) for step in range(200)])
        settle()
        assert [(f.step, len(f.scalars)) for f in in_order(bench, run_id)] == [(s, s % 2) for s in range(200)]

    def test_lack_what_retention_dropped_and_tell_how_much(self, bench, clock):
        run_id = bench.register()
        bench.send(run_id, [Frame(step, step, 0.0, {"loss": 1.0, "lr": 2.0}) for step in range(301)])
        bench.store.settle(sizes=Sizes(100, 0))
        clock.now += 10
        bench.keep(Retention("p", samples_s=5.0))
        with bench.store.read() as reader:
            export = reader.frames.export(run_id)
            found = [frame.step for frame in export.frames() if frame.scalars]
        assert found == [300]
        assert (export.num_dropped, export.num_damaged) == (600, 0)

    def test_take_no_more_memory_for_a_long_run(self, bench):
        if bench.engine.name == "memory":
            pytest.skip("all of its frames are in memory")

        def most_bytes(num_frames):
            run_id = bench.register(str(num_frames))
            bench.fill(run_id, [layer_frame(step, [0.0] * 3) for step in range(num_frames)])
            bench.store.settle(sizes=Sizes(100, 0))
            with bench.store.read() as reader:
                # What is loaded once is loaded.
                assert sum(1 for _ in reader.frames.export(run_id).frames()) == num_frames
                tracemalloc.start()
                for _ in reader.frames.export(run_id).frames():
                    pass
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return most

        assert most_bytes(4000) < 1.5 * most_bytes(500)


class TestFramesAfterAStep:
    def test_are_the_attempts_own_as_they_were_sent(self, bench, settle):
        run_id, sent = bench.register(), [*frames_of_a_long_run(200)]
        bench.fill(run_id, sent)
        bench.register(resume_step=sent[150].step)
        bench.send(run_id, [loss_frame(sent[-1].step + 1, seq=0)], attempt=2)
        settle()
        with bench.store.read() as reader:
            assert exactly([*reader.frames.after(run_id, 1, sent[119].step)]) == exactly(sent[120:])
            assert [*reader.frames.after(run_id, 1, sent[-1].step)] == []


class TestPieces:
    def test_hold_all_that_was_sent(self, bench, settle):
        run_id, sent = bench.register(), [*frames_of_a_long_run(300)]
        bench.fill(run_id, sent)
        settle()
        with bench.store.read() as reader:
            pieces = list(reader.frames.export(run_id).pieces())
        assert values_of(pieces) == dict(written_out(sent))
        for _, steps in groupby(pieces, key=lambda piece: piece.metric):
            assert all((np.diff(piece.steps) >= 0).all() for piece in steps)

    def test_are_cut_to_steps_and_metrics(self, bench, settle):
        run_id, sent = bench.register(), [*frames_of_a_long_run(300)]
        bench.fill(run_id, sent)
        settle()
        with bench.store.read() as reader:
            where = {"from_step": sent[30].step, "to_step": sent[270].step}
            found = values_of(reader.frames.export(run_id, metrics=["loss", "param_norm"], **where).pieces())
        expected = dict(written_out(sent[30:271]))
        assert found == {key: value for key, value in expected.items() if key[5] in ("loss", "param_norm")}


class TestAMetric:
    @pytest.mark.parametrize("attempt", [None, 1, 2])
    def test_has_as_many_rows_as_its_attempt_recorded(self, bench, settle, attempt):
        run_id = bench.register()
        bench.send(run_id, [layer_frame(step, [0.0, 0.25, 0.5]) for step in range(100)])
        bench.register(num_blocks=4, resume_step=50)
        bench.send(run_id, [layer_frame(50, [1, 2, 3, 4, 5])], attempt=2)
        settle()
        with bench.store.read() as reader:
            metric = reader.frames.metric(run_id, "layers", "token_similarity", attempt=attempt)
            assert metric.num_rows() == {None: 5, 1: 3, 2: 5}[attempt]
            assert reader.frames.metric(run_id, "layers", "grad_norm", attempt=attempt).num_rows() == 0

    def test_is_read_entry_by_entry(self, bench, settle):
        run_id = bench.register()
        heads = [Array.of([step + i / 8 for i in range(6)], (2, 3)) for step in range(100)]
        bench.send(run_id, [Frame(s, s, 0.0, {}, {}, {"attention_entropy": h}) for s, h in enumerate(heads)])
        settle()
        for entry in ((0, 0), (1, 2), (1, 0)):
            samples = bench.samples(run_id, "heads", "attention_entropy", entry=entry, from_step=5, to_step=90)
            assert samples.steps.tolist() == [*range(5, 91)]
            expected = [step + (3 * entry[0] + entry[1]) / 8 for step in range(5, 91)]
            assert samples.values[:, 0].tolist() == expected
        assert len(bench.samples(run_id, "heads", "attention_entropy", entry=(2, 0)).steps) == 0

    def test_that_was_never_recorded_is_empty(self, bench, settle):
        run_id = bench.register()
        bench.send(run_id, [loss_frame(step) for step in range(60)])
        settle()
        with bench.store.read() as reader:
            metric = reader.frames.metric(run_id, "layers", "grad_norm")
            assert metric.extent() is None
            assert len(metric.points(10, ends_alone=True).cells.spans) == 0

    def test_extends_over_what_is_visible(self, bench, settle):
        run_id = bench.register()
        bench.send(run_id, [loss_frame(step) for step in range(10, 200)])
        bench.register(resume_step=150)
        settle()
        with bench.store.read() as reader:
            assert reader.frames.metric(run_id, "scalars", "loss").extent() == (10, 149, 140)
            assert reader.frames.metric(run_id, "scalars", "loss", attempt=1).extent() == (10, 199, 190)


class TestWhatIsRecorded:
    def test_is_every_metric_in_its_largest_shape(self, bench, settle):
        run_id = bench.register()
        bench.fill(run_id, frames_of_a_long_run(1000))
        settle()
        with bench.store.read() as reader:
            found = reader.frames.recorded(run_id)
        assert found.scalars == ["loss"]
        assert found.layers == {"param_norm": 2, "token_similarity": 3}
        assert found.heads == {"attention_entropy": (2, 4)}


class TestLiveRuns:
    def live(self, bench, **more):
        with bench.store.read() as reader:
            return reader.live.runs(running_since=0.0, ended_since=0.0, most=9, **more).runs

    def test_show_the_newest_frame_of_each_writer_and_what_it_lacks(self, bench):
        run_id = bench.register()
        bench.send(run_id, [layer_frame(step, [step, 0, 0], "grad_norm") for step in (1, 2, 30)])
        bench.send(run_id, [loss_frame(step, float(step), seq=100 + step) for step in (30, 33, 40)])
        bench.send(run_id, [loss_frame(39, 7.0)], writer="other")
        (run,) = self.live(bench)
        assert (run.run_id, run.step) == (run_id, 40)
        assert [values["scalars"]["loss"] for values in run.newest] == [40.0, 7.0]
        assert [values["layers"]["grad_norm"][0] for values in run.others] == [30.0]

    def test_show_a_frame_that_has_settled_where_later_ones_are_hidden(self, bench):
        run_id = bench.register()
        bench.send(run_id, [loss_frame(step, float(step)) for step in range(300)])
        bench.store.settle(sizes=Sizes(100, 50))
        bench.register(resume_step=120)
        (run,) = self.live(bench)
        assert (run.step, [values["scalars"]["loss"] for values in run.newest]) == (119, [119.0])
