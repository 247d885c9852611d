"""What the service answers does not depend on what has moved into chunks."""

import math
import random

import pytest

from tests.server.conftest import layer_frame, loss_frame
from tsemon.wire import Array, Frame
from tsemon_server.store import Sizes, Store


@pytest.fixture
def store(api):
    store = Store(api.database.url)
    yield store
    store.close()


def frames_of_a_long_run(num_frames=1500, seed=0):
    """Cadences from every step to every 50th, metrics that come and go, a model that is rebuilt, NaN and infinities."""
    draw, step = random.Random(seed), 0
    for seq in range(num_frames):
        step += draw.choice((1, 1, 1, 5, 50))
        scalars = {"loss": draw.choice((draw.random(), draw.random(), math.nan, math.inf, 1e300))}
        layers = {"token_similarity": Array.of(draw.gauss(0, 1) for _ in range(3))}
        if seq % 10 == 0:
            layers["param_norm"] = Array.of(draw.choice((draw.random(), math.nan)) for _ in range(2))
        num_heads = 2 if seq > 900 and seq % 3 else 4
        heads = {"attention_entropy": Array.of((draw.random() for _ in range(2 * num_heads)), (2, num_heads))}
        yield Frame(seq, step, 1e9 + seq, scalars, layers, heads)


def fill(api, run_id, frames, **where):
    for start in range(0, len(frames), 100):
        api.send_ok(run_id, frames[start : start + 100], **where)


def answers(api, run_id):
    """All kinds of charts, over all kinds of ranges."""
    last = api.get(f"/runs/{run_id}")["last_step"]
    ranges = [(None, None), (0, last // 3), (last // 3, last // 2 + 1), (last // 2, last // 2), (last, None)]
    found = [api.get(f"/runs/{run_id}")]
    for from_step, to_step in ranges:
        where = {"from_step": from_step, "to_step": to_step}
        for points in (3, 10, 100, 500, 10_000):
            for metric in ({"metric": "loss"}, {"metric": "token_similarity", "layer": 2}):
                found.append(api.get(f"/runs/{run_id}/series", **metric, **where, points=points))
            for attempt in (None, 1):
                found.append(
                    api.get(
                        f"/runs/{run_id}/series",
                        metric="attention_entropy",
                        layer=1,
                        head=1,
                        points=points,
                        attempt=attempt,
                        **where,
                    )
                )
        for columns in (1, 7, 200, 2000):
            found.append(api.get(f"/runs/{run_id}/heatmap", metric="param_norm", columns=columns, **where))
    return found


def close_to(answer):
    """Means are kept in float32, whose rounding is 6e-8 of the largest value at hand; all else is exact."""
    if isinstance(answer, dict):
        return {name: close_to(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [close_to(value) for value in answer]
    return pytest.approx(answer, rel=1e-5, abs=1e-6) if isinstance(answer, float) else answer


class TestSettledFrames:
    # The small ones make 186 segments and 11 blocks of them.
    @pytest.mark.parametrize(
        ("sizes", "num_segments"), [(Sizes(), 2), (Sizes(segment=8, kept=5), 186)], ids=["512", "8"]
    )
    def test_give_the_same_answers_as_before(self, api, store, sizes, num_segments):
        run_id = api.register()
        fill(api, run_id, [*frames_of_a_long_run()])
        expected = answers(api, run_id)
        assert store.settle(sizes=sizes) == num_segments
        assert answers(api, run_id) == close_to(expected)

    @pytest.mark.parametrize(
        ("sizes", "num_segments"), [(Sizes(), 4), (Sizes(segment=8, kept=5), 287)], ids=["512", "8"]
    )
    def test_give_the_same_answers_where_a_later_attempt_hides_some(self, api, store, sizes, num_segments):
        run_id = api.register()
        fill(api, run_id, [*frames_of_a_long_run()])
        for attempt, resume_step in ((2, 3000), (3, 3500)):
            api.register(resume_step=resume_step)
            fill(api, run_id, [loss_frame(resume_step + 2 * seq, seq, seq=seq) for seq in range(400)], attempt=attempt)
        expected = answers(api, run_id)
        assert store.settle(sizes=sizes) == num_segments
        assert answers(api, run_id) == close_to(expected)

    def test_of_a_deeper_model_leave_nothing_in_a_range_where_they_are_hidden(self, api, store):
        """Their chunk reaches into the range, none of their samples does."""
        run_id = api.register(num_blocks=2)
        fill(api, run_id, [layer_frame(step, [1.0, 2.0, 3.0]) for step in (*range(100), 2000)])
        api.register(num_blocks=1, resume_step=1000)
        fill(api, run_id, [layer_frame(1000, [4.0, 5.0])], attempt=2)
        api.register(num_blocks=0, resume_step=1001)
        fill(api, run_id, [layer_frame(1001, [6.0])], attempt=3)
        store.settle(sizes=Sizes(segment=200, kept=50))
        found = api.get(f"/runs/{run_id}/heatmap", metric="token_similarity", from_step=500)
        assert (found["layers"], found["values"]) == (2, [[4.0, 5.0], [6.0, None]])
        with store.read() as reader:
            samples = reader.frames.metric(run_id, "layers", "token_similarity", from_step=500).samples()
        assert samples.steps.tolist() == [1000, 1001]
        assert repr(samples.values.tolist()) == "[[4.0, 5.0], [6.0, nan]]"

    def test_of_several_writers_are_one_newest_frame_as_before(self, api, store):
        run_id = api.register()
        for writer, metric in (("stage0", "learning_rate"), ("stage1", "loss")):
            fill(api, run_id, [Frame(step, step, 0.0, {metric: step}) for step in range(100)], writer=writer)
        api.register(resume_step=80)
        expected = api.get(f"/runs/{run_id}")["latest"]
        assert expected["scalars"] == {"loss": 79.0}
        store.settle(sizes=Sizes(segment=50, kept=0))
        fill(api, run_id, [loss_frame(80)], attempt=2)
        store.settle(sizes=Sizes(segment=50, kept=0))
        api.register(resume_step=80)
        assert api.get(f"/runs/{run_id}")["latest"] == expected

    def test_leave_the_newest_frame_where_it_is(self, api, store):
        run_id = api.register()
        fill(api, run_id, [loss_frame(step) for step in range(600)])
        api.http.patch(f"/api/v1/runs/{run_id}", json={"state": "finished"})
        assert store.settle() == 2
        assert api.get(f"/runs/{run_id}")["latest"]["step"] == 599
        assert store.settle() == 0

    def test_are_found_by_a_run_that_goes_back_to_them(self, api, store):
        run_id = api.register()
        fill(api, run_id, [loss_frame(step, loss=step) for step in range(600)])
        store.settle()
        api.register(resume_step=101)
        run = api.get(f"/runs/{run_id}")
        assert (run["last_step"], run["loss"]) == (100, 100.0)
        assert run["latest"] == {"step": 100, "time": 1100.0, "scalars": {"loss": 100.0}}

    def test_are_known_when_they_come_once_more(self, api, store):
        run_id = api.register()
        frames = [loss_frame(step) for step in range(1500)]
        fill(api, run_id, frames)
        store.settle()
        fill(api, run_id, frames)
        assert api.get(f"/runs/{run_id}")["num_frames"] == 1500
        assert len(api.losses(run_id, points=10_000)) == 1500

    def test_are_joined_by_late_ones(self, api, store):
        run_id = api.register()
        frames = [loss_frame(step, loss=step) for step in range(2000)]
        fill(api, run_id, frames[::2])
        store.settle()
        fill(api, run_id, frames[1::2])
        store.settle()
        assert api.losses(run_id, points=10_000) == {step: step for step in range(2000)}

    @pytest.mark.parametrize("points", [3, 20, 300])
    def test_keep_a_spike_of_one_step_at_every_zoom(self, api, store, points):
        run_id = api.register()
        frames = [loss_frame(step, loss=9.0 if step == 777 else 1.0) for step in range(3000)]
        fill(api, run_id, frames)
        store.settle()
        series = api.get(f"/runs/{run_id}/series", metric="loss", points=points)
        assert max(series["max"]) == 9.0
        assert len(series["step"]) <= points
        assert (series["step"][0], series["step"][-1]) == (0, 2999)

    @pytest.mark.parametrize("column", ["cells", "stats"])
    def test_are_read_chunk_by_chunk_where_a_block_of_them_is_damaged(self, api, store, column):
        run_id = api.register()
        fill(api, run_id, [*frames_of_a_long_run()])
        store.settle(sizes=Sizes(segment=8, kept=5))
        expected = answers(api, run_id)
        # One byte of every block is another.
        flipped = f"CAST(substr({column}, 1, 9) || char(1) || substr({column}, 11) AS BLOB)"
        if api.database.engine == "postgresql":
            flipped = f"overlay({column} PLACING bytea '\\x01' FROM 10 FOR 1)"
        changed = api.database.execute(f"UPDATE block SET {column} = {flipped} RETURNING number")
        assert len(changed) == 40
        assert answers(api, run_id) == close_to(expected)

    def test_leave_a_frame_behind_whose_row_is_damaged(self, api, store, caplog):
        run_id = api.register()
        fill(api, run_id, [loss_frame(step, loss=step) for step in range(700)])
        api.database.execute("UPDATE frame SET blob = substr(blob, 1, 5) WHERE seq = 17")
        assert store.settle() == 1
        series = api.get(f"/runs/{run_id}/series", metric="loss", points=1000)
        assert series["damaged"] == 1
        assert series["step"] == [step for step in range(700) if step != 17]
        assert f"1 frames of run {run_id} are damaged" in caplog.text

    def test_do_not_come_back_when_their_run_is_deleted_under_way(self, api, store):
        run_id = api.register()
        fill(api, run_id, [loss_frame(step) for step in range(600)])
        api.http.delete(f"/api/v1/runs/{run_id}")
        assert store.settle() == 0
