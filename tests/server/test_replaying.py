"""A stored run, frame by frame as the rules saw it."""

import json
import random
import tracemalloc

import pytest

from tests.server.conftest import layer_frame, loss_frame
from tests.server.test_settling import fill, frames_of_a_long_run
from tsemon.wire import Frame
from tsemon_server.store import Sizes, Store


@pytest.fixture
def store(api):
    store = Store(api.database.url)
    yield store
    store.close()


@pytest.fixture(params=["hot", "settled", "both"])
def settle(request, store):
    """Move none, all but the newest, or some of the frames into chunks."""
    sizes = {"hot": Sizes(10**6, 10**6), "settled": Sizes(50, 0), "both": Sizes(50, 70)}[request.param]
    return lambda: store.settle(sizes=sizes)


def replayed(store, run_id, attempts=None):
    with store.read() as reader:
        return [
            frame for attempt in attempts or [None] for frame in reader.frames.export(run_id, attempt=attempt).frames()
        ]


def exactly(frames):
    """What frames of either kind hold; arrays to the last bit, and NaN is equal to itself."""
    return [json.loads((f if isinstance(f, Frame) else f.to_wire()).to_json()) for f in frames]


class TestFramesInOrder:
    def test_are_those_that_were_sent_to_the_last_bit(self, api, store, settle):
        run_id, sent = api.register(), [*frames_of_a_long_run(300)]
        fill(api, run_id, sent)
        settle()
        assert exactly(replayed(store, run_id)) == exactly(sent)

    def test_come_by_step_however_they_came(self, api, store, settle):
        run_id, steps = api.register(), [*range(300)]
        random.Random(0).shuffle(steps)
        for start in range(0, 300, 30):
            frames = [loss_frame(step, float(step), seq=start + i) for i, step in enumerate(steps[start : start + 30])]
            api.send_ok(run_id, frames)
            settle()
        found = replayed(store, run_id)
        assert [(frame.step, frame.scalars["loss"]) for frame in found] == [(step, float(step)) for step in range(300)]

    def test_of_one_step_come_by_writer_and_seq(self, api, store, settle):
        run_id = api.register()
        for writer in ("b", "a"):
            api.send_ok(run_id, [loss_frame(step // 2, seq=step) for step in range(120)], writer=writer)
            settle()
        found = [(frame.step, frame.writer, frame.seq) for frame in replayed(store, run_id)]
        assert found == [(step, writer, 2 * step + i) for step in range(60) for writer in "ab" for i in (0, 1)]

    def test_are_those_that_no_later_attempt_hides_or_all_of_one(self, api, store, settle):
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(step, 1.0) for step in range(100)])
        api.register(resume_step=60)
        api.send_ok(run_id, [loss_frame(step, 2.0) for step in range(60, 160)], attempt=2)
        settle()
        told = lambda attempts=None: [(f.attempt, f.step) for f in replayed(store, run_id, attempts)]  # noqa: E731
        first, second = ([(1, step) for step in range(100)], [(2, step) for step in range(60, 160)])
        assert told() == first[:60] + second
        assert told([1]) == first
        assert told([2, 1]) == second + first

    def test_include_frames_without_any_value(self, api, store, settle):
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(step) if step % 2 else Frame(step, step, 1.0) for step in range(200)])
        settle()
        assert [(f.step, len(f.scalars)) for f in replayed(store, run_id)] == [(s, s % 2) for s in range(200)]

    def test_lack_what_retention_dropped_and_what_is_damaged_and_tell_how_much(self, api, store):
        run_id = api.register()
        api.send_ok(run_id, [loss_frame(step) for step in range(301)])
        store.settle(sizes=Sizes(100, 0))
        for column, number in (("samples = NULL", 0), ("samples = substr(samples, 1, 9)", 1)):
            api.database.execute(f"UPDATE chunk SET {column} WHERE number = {number}")
        with store.read() as reader:
            replay = reader.frames.export(run_id)
            found = [frame.step for frame in replay.frames() if "loss" in frame.scalars]
        assert found == [*range(200, 301)]
        assert (replay.num_dropped, replay.num_damaged) == (100, 100)

    def test_take_no_more_memory_for_a_long_run(self, api, store):
        def most_bytes(num_frames):
            run_id = api.register(str(num_frames))
            fill(api, run_id, [layer_frame(step, [0.0] * 3) for step in range(num_frames)])
            store.settle(sizes=Sizes(100, 0))
            with store.read() as reader:
                assert (
                    sum(1 for _ in reader.frames.export(run_id).frames()) == num_frames
                )  # what is loaded once is loaded
                tracemalloc.start()
                for _ in reader.frames.export(run_id).frames():
                    pass
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return most

        assert most_bytes(4000) < 1.5 * most_bytes(500)


class TestFramesAfterAStep:
    def test_are_the_attempts_own_as_they_were_sent(self, api, store, settle):
        run_id, sent = api.register(), [*frames_of_a_long_run(200)]
        fill(api, run_id, sent)
        api.register(resume_step=sent[150].step)
        api.send_ok(run_id, [loss_frame(sent[-1].step + 1, seq=0)], attempt=2)
        settle()
        with store.read() as reader:
            assert exactly(reader.frames.after(run_id, 1, sent[119].step)) == exactly(sent[120:])
            assert reader.frames.after(run_id, 1, sent[-1].step) == []
