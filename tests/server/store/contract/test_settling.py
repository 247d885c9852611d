"""What the store answers does not depend on what has settled."""

import pytest

from tests.server.conftest import layer_frame, loss_frame
from tests.server.frames import frames_of_a_long_run
from tsemon.wire import Frame
from tsemon_server.store.series.settling import Sizes


def answers(bench, run_id):
    """All kinds of charts, over all kinds of ranges."""
    last = bench.detail(run_id)["last_step"]
    ranges = [(None, None), (0, last // 3), (last // 3, last // 2 + 1), (last // 2, last // 2), (last, None)]
    found = [bench.detail(run_id)]
    for from_step, to_step in ranges:
        where = {"from_step": from_step, "to_step": to_step}
        for points in (3, 100, 10_000):
            found.append(bench.series(run_id, "loss", **where, points=points))
            found.append(bench.series(run_id, "token_similarity", layer=2, **where, points=points))
            for attempt in (None, 1):
                of_head = {"layer": 1, "head": 1, "points": points, "attempt": attempt}
                found.append(bench.series(run_id, "attention_entropy", **of_head, **where))
        for columns in (1, 7, 2000):
            found.append(bench.heatmap(run_id, "param_norm", columns=columns, **where))
    return found


def close_to(answer):
    """Means are kept in float32, whose rounding is 6e-8 of the largest value at hand; all else is exact."""
    if isinstance(answer, dict):
        return {name: close_to(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [close_to(value) for value in answer]
    return pytest.approx(answer, rel=1e-5, abs=1e-6) if isinstance(answer, float) else answer


TINY = Sizes(segment=8, kept=5)
"""They make 186 segments, and 11 blocks of them."""


class TestSettledFrames:
    @pytest.mark.parametrize(
        ("sizes", "num_segments"),
        [pytest.param(Sizes(), 2, id="512", marks=pytest.mark.thorough), pytest.param(TINY, 186, id="8")],
    )
    def test_give_the_same_answers_as_before(self, bench, sizes, num_segments):
        run_id = bench.register()
        bench.fill(run_id, frames_of_a_long_run())
        expected = answers(bench, run_id)
        assert bench.store.settle(sizes=sizes) == num_segments
        assert answers(bench, run_id) == close_to(expected)

    @pytest.mark.parametrize(
        ("sizes", "num_segments"),
        [pytest.param(Sizes(), 4, id="512", marks=pytest.mark.thorough), pytest.param(TINY, 287, id="8")],
    )
    def test_give_the_same_answers_where_a_later_attempt_hides_some(self, bench, sizes, num_segments):
        run_id = bench.register()
        bench.fill(run_id, frames_of_a_long_run())
        for attempt, resume_step in ((2, 3000), (3, 3500)):
            bench.register(resume_step=resume_step)
            frames = [loss_frame(resume_step + 2 * seq, seq, seq=seq) for seq in range(400)]
            bench.fill(run_id, frames, attempt=attempt)
            with bench.store.write() as writer:  # one that is live keeps its newest frames hot
                writer.runs.change(run_id, state="failed", attempt=attempt - 1)
        expected = answers(bench, run_id)
        assert bench.store.settle(sizes=sizes) == num_segments
        assert answers(bench, run_id) == close_to(expected)

    @pytest.mark.both_engines
    def test_of_a_deeper_model_leave_nothing_in_a_range_where_they_are_hidden(self, bench):
        """Their chunk reaches into the range, none of their samples does."""
        run_id = bench.register(num_blocks=2)
        bench.fill(run_id, [layer_frame(step, [1.0, 2.0, 3.0]) for step in (*range(100), 2000)])
        bench.register(num_blocks=1, resume_step=1000)
        bench.fill(run_id, [layer_frame(1000, [4.0, 5.0])], attempt=2)
        bench.register(num_blocks=0, resume_step=1001)
        bench.fill(run_id, [layer_frame(1001, [6.0])], attempt=3)
        bench.store.settle(sizes=Sizes(segment=200, kept=50))
        found = bench.heatmap(run_id, "token_similarity", from_step=500)
        assert (found["layers"], found["values"]) == (2, [[4.0, 5.0], [6.0, None]])
        samples = bench.samples(run_id, "layers", "token_similarity", from_step=500)
        assert samples.steps.tolist() == [1000, 1001]
        assert repr(samples.values.tolist()) == "[[4.0, 5.0], [6.0, nan]]"

    @pytest.mark.both_engines
    def test_of_several_writers_are_one_newest_frame_as_before(self, bench):
        run_id = bench.register()
        for writer, metric in (("stage0", "learning_rate"), ("stage1", "loss")):
            bench.fill(run_id, [Frame(step, step, 0.0, {metric: float(step)}) for step in range(100)], writer=writer)
        bench.register(resume_step=80)
        expected = bench.detail(run_id)["latest"]
        assert expected["scalars"] == {"loss": 79.0}
        bench.store.settle(sizes=Sizes(segment=50, kept=0))
        bench.fill(run_id, [loss_frame(80)], attempt=2)
        bench.store.settle(sizes=Sizes(segment=50, kept=0))
        bench.register(resume_step=80)
        assert bench.detail(run_id)["latest"] == expected

    @pytest.mark.both_engines
    def test_leave_the_newest_frame_where_it_is(self, bench):
        run_id = bench.register()
        bench.fill(run_id, [loss_frame(step) for step in range(600)])
        bench.end(run_id)
        assert bench.store.settle() == 2
        assert bench.detail(run_id)["latest"]["step"] == 599
        with bench.store.read() as reader:
            assert reader.live.backlog().frames == 1
            assert reader.frames.newest(run_id).step == 599
        assert bench.store.settle() == 0

    @pytest.mark.both_engines
    def test_are_found_by_a_run_that_goes_back_to_them(self, bench):
        run_id = bench.register()
        bench.fill(run_id, [loss_frame(step, loss=float(step)) for step in range(600)])
        bench.store.settle()
        bench.register(resume_step=101)
        run = bench.detail(run_id)
        assert (run["last_step"], run["loss"]) == (100, 100.0)
        assert run["latest"] == {"step": 100, "time": 1100.0, "scalars": {"loss": 100.0}}

    @pytest.mark.both_engines
    def test_are_known_when_they_come_once_more(self, bench):
        run_id = bench.register()
        frames = [loss_frame(step) for step in range(1500)]
        bench.fill(run_id, frames)
        bench.store.settle()
        assert bench.send(run_id, frames) == 0
        assert bench.detail(run_id)["num_frames"] == 1500
        assert len(bench.losses(run_id)) == 1500

    @pytest.mark.both_engines
    def test_are_joined_by_late_ones(self, bench):
        run_id = bench.register()
        frames = [loss_frame(step, loss=float(step)) for step in range(2000)]
        bench.fill(run_id, frames[::2])
        bench.store.settle()
        bench.fill(run_id, frames[1::2])
        bench.store.settle()
        assert bench.losses(run_id) == {step: step for step in range(2000)}

    @pytest.mark.parametrize("points", [3, 20, 300])
    @pytest.mark.both_engines
    def test_keep_a_spike_of_one_step_at_every_zoom(self, bench, points):
        run_id = bench.register()
        bench.fill(run_id, [loss_frame(step, loss=9.0 if step == 777 else 1.0) for step in range(3000)])
        bench.store.settle()
        series = bench.series(run_id, "loss", points=points)
        assert max(series["max"]) == 9.0
        assert len(series["step"]) <= points
        assert (series["step"][0], series["step"][-1]) == (0, 2999)

    @pytest.mark.both_engines
    def test_are_none_of_a_run_that_is_deleted(self, bench):
        run_id = bench.register()
        bench.fill(run_id, [loss_frame(step) for step in range(600)])
        bench.delete(run_id)
        assert bench.store.settle() == 0
