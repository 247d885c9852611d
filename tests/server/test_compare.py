"""Several runs in one chart."""

import numpy as np
import pytest

from tests.server.conftest import layer_frame, loss_frame, problem
from tsemon.wire import Frame
from tsemon_server.store import Store
from tsemon_server.store.series.settling import Sizes


def send(api, run_id, frames, **where):
    for start in range(0, len(frames), 500):
        api.send_ok(run_id, frames[start : start + 500], **where)


@pytest.fixture
def runs(api):
    """One run of steps 0 to 1,999, one of every 7th step from 500 to 3,993; both are settled in part."""
    runs = [api.register("long", project="p"), api.register("late")]
    send(api, runs[0], [loss_frame(step, 9.0 if step == 777 else 1.0) for step in range(2000)])
    send(api, runs[1], [loss_frame(step, float(step)) for step in range(500, 4000, 7)])
    store = Store(api.database.url)
    store.settle()
    store.close()
    return runs


class TestAComparison:
    def test_has_the_same_buckets_for_all_runs(self, api, runs):
        found = api.get("/compare", run=runs, metric="loss", points=50)
        assert [(run["run_id"], run["project"], run["run"]) for run in found["runs"]] == [
            (runs[0], "p", "long"),
            (runs[1], "default", "late"),
        ]
        # 0 to 3,993 in at most 50 spans of a power of two: 128 steps each
        long, late = found["runs"]
        assert long["step"] == [*range(63, 1919, 128), (1920 + 1999) // 2]
        assert [step // 128 for step in late["step"]] == [*range(3, 32)]
        inside = [step for step in range(500, 4000, 7) if step // 128 == 10]
        number = late["step"].index((inside[0] + inside[-1]) // 2)
        assert (late["min"][number], late["max"][number]) == (inside[0], inside[-1])

    def test_keeps_a_spike_of_one_step(self, api, runs):
        assert max(api.get("/compare", run=runs, metric="loss", points=10)["runs"][0]["max"]) == 9.0

    def test_has_every_sample_where_those_of_each_run_fit(self, api, runs):
        found = api.get("/compare", run=runs, metric="loss", points=2000)["runs"]
        assert [run["step"] for run in found] == [[*range(2000)], [*range(500, 4000, 7)]]

    def test_is_cut_to_steps(self, api, runs):
        found = api.get("/compare", run=runs, metric="loss", from_step=1990, to_step=2010)["runs"]
        assert [run["step"] for run in found] == [[*range(1990, 2000)], [1991, 1998, 2005]]

    def test_shows_runs_without_the_metric_empty(self, api):
        deep, shallow, other = api.register("deep", num_blocks=5), api.register("shallow"), api.register("other")
        api.send_ok(deep, [layer_frame(0, [1, 2, 3, 4, 5, 6])])
        api.send_ok(shallow, [layer_frame(0, [1, 2, 3])])
        found = api.get("/compare", run=[deep, shallow, other], metric="token_similarity", layer=4)
        assert [run["mean"] for run in found["runs"]] == [[5.0], [], []]

    def test_lies_along_steps_or_seconds_from_the_first_frame(self, api, runs):
        by_step = api.get("/compare", run=runs, metric="loss", points=50)["runs"]
        assert [run["x"] for run in by_step] == [run["step"] for run in by_step]
        # A frame's time is 1000 s and one for each step, so the line between frames is that, too.
        for found in (
            api.get("/compare", run=runs, metric="loss", points=50, along="time"),
            api.get("/compare", run=runs, metric="loss", from_step=1500, to_step=3000, along="time"),
        ):
            assert found["along"] == "time"
            for run, first in zip(found["runs"], (0, 500), strict=True):
                assert len(run["x"]) > 10
                assert run["x"] == pytest.approx([step - first for step in run["step"]])

    @pytest.mark.parametrize("segment", [512, 3])
    def test_counts_the_time_between_attempts_and_not_what_a_later_one_hides(self, api, segment):
        run_id, seen = api.register(), {}
        for attempt, steps, began_at in ((1, range(0, 1000, 10), 5.0), (2, range(500, 1500, 37), 9000.0)):
            times = {step: began_at + step**2 / 100 for step in steps}
            seen = {step: time for step, time in seen.items() if step < steps[0]} | times
            frames = [Frame(step, step, time, {"loss": 1.0}) for step, time in times.items()]
            api.send_ok(run_id, frames, attempt=attempt)
            if attempt == 1:
                api.register(resume_step=500)
        store = Store(api.database.url)
        store.settle(sizes=Sizes(segment=segment, kept=0))
        store.close()
        for ask in ({"points": 1000}, {"points": 40}, {"points": 7}, {"from_step": 490, "to_step": 510}):
            found = api.get("/compare", run=[run_id], metric="loss", along="time", **ask)["runs"][0]
            expected = np.interp(found["step"], list(seen), list(seen.values())) - 5.0
            assert found["x"] == pytest.approx(expected.tolist()), ask

    def test_lies_along_the_tokens_that_a_run_has_counted(self, api):
        counted, not_counted = api.register("a"), api.register("b")
        scalars = [{"loss": 1.0} | ({"tokens": 32.0 * step} if step != 3 else {}) for step in range(1000)]
        send(api, counted, [Frame(step, step, 1.0, scalars[step]) for step in range(1000)])
        send(api, not_counted, [loss_frame(step) for step in range(0, 1000, 10)])
        store = Store(api.database.url)
        store.settle()
        store.close()
        ask = {"run": [counted, not_counted], "metric": "loss", "along": "tokens"}
        found = api.get("/compare", points=1000, **ask)["runs"]
        assert found[0]["x"] == [None if step == 3 else 32.0 * step for step in range(1000)]
        assert found[1]["x"] == [None] * 100
        # Spans of 64 steps: 0 to 63 without the 3, 64 to 127, ...
        found = api.get("/compare", points=20, **ask)["runs"]
        assert len(found[0]["x"]) == len(found[0]["step"]) == 16
        assert found[0]["x"][:2] == pytest.approx([32 * (sum(range(64)) - 3) / 63, 32 * (64 + 127) / 2])

    def test_names_a_run_once(self, api, runs):
        assert len(api.get("/compare", run=[runs[0]] * 3, metric="loss")["runs"]) == 1

    @pytest.mark.parametrize(
        ("ask", "status", "error"),
        [
            ({"run": ["nope"]}, 404, "unknown_run"),
            ({"run": [*map(str, range(21))]}, 422, "invalid_argument"),
            ({"run": []}, 422, "invalid_argument"),
            ({"metric": "los"}, 404, "unknown_metric"),
            ({"metric": "token_similarity"}, 422, "invalid_argument"),
            ({"metric": "token_similarity", "layer": 3}, 404, "unknown_layer"),
            ({"from_step": 2, "to_step": 1}, 422, "invalid_range"),
            ({"along": "epochs"}, 422, "invalid_argument"),
        ],
    )
    def test_tells_what_is_wrong_with_the_question(self, api, ask, status, error):
        reply = api.http.get("/api/v1/compare", params={"run": [api.register()], "metric": "loss"} | ask)
        assert problem(reply)[:2] == (status, error)
