"""Several runs in one chart."""

import pytest

from tests.server.conftest import layer_frame, loss_frame, problem
from tsemon_server.store import Store


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
        ],
    )
    def test_tells_what_is_wrong_with_the_question(self, api, ask, status, error):
        reply = api.http.get("/api/v1/compare", params={"run": [api.register()], "metric": "loss"} | ask)
        assert problem(reply)[:2] == (status, error)
