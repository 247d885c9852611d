"""The same answers as rows."""

import math

import pytest

from tests.server.conftest import layer_frame, loss_frame, problem


@pytest.fixture
def runs(api):
    """Two runs of different depth; the second lacks a layer's value at step 2."""
    deep, shallow = api.register("deep", project="p", num_blocks=3), api.register("shallow")
    api.send_ok(deep, [layer_frame(step, [step, step + 0.25, step + 0.5, step + 0.75]) for step in range(4)])
    api.send_ok(
        shallow, [layer_frame(step, [step, step + 1, math.nan if step == 2 else step + 2]) for step in range(4)]
    )
    return [deep, shallow]


class TestRowsOfRuns:
    def test_are_those_of_the_list_with_a_label(self, api, runs):
        rows = api.get("/rows/runs")["rows"]
        assert [row.pop("label") for row in rows] == ["default/shallow", "p/deep"]
        assert rows == api.get("/runs")["runs"]
        assert [row["run_id"] for row in api.get("/rows/runs", limit=1)["rows"]] == runs[1:]

    def test_are_those_that_are_named(self, api, runs):
        for run in (runs, ",".join(runs)):
            assert [row["run_id"] for row in api.get("/rows/runs", run=run)["rows"]] == runs
        assert api.get("/rows/runs", run=",".join(runs * 11))[:2] == (422, "invalid_argument")
        assert api.get("/rows/runs", run="nope")[:2] == (404, "unknown_run")

    def test_of_another_project_are_not_there_and_no_way_around_is_named(self, api, runs):
        """With a token of one project the service itself adds `project`: nobody can leave it out."""
        status, code, detail = api.get("/rows/runs", run=runs[0], project="default")
        assert (status, code, detail) == (404, "unknown_run", f"no run has the id '{runs[0]}' in project 'default'")


class TestRowsOfMetrics:
    def test_are_what_any_of_the_runs_has(self, api, runs):
        api.send_ok(runs[1], [loss_frame(9)])
        layers = {"rows": [{"metric": "token_similarity"}]}
        assert api.get("/rows/metrics", run=runs[0], kind="layers") == layers
        assert api.get("/rows/metrics", run=runs[0], kind="scalars") == {"rows": []}
        for run in (runs, ",".join(runs)):
            assert api.get("/rows/metrics", run=run, kind="scalars") == {"rows": [{"metric": "loss"}]}

    def test_are_of_a_kind_that_there_is(self, api, runs):
        assert api.get("/rows/metrics", run=runs[0], kind="all")[:2] == (422, "invalid_argument")


class TestRowsOfASeries:
    def test_are_the_buckets_of_a_comparison(self, api, runs):
        for run in runs:
            api.send_ok(run, [loss_frame(step, step * 1.5) for step in range(4, 300)])
        ask = {"metric": "loss", "points": 20, "from_step": 10}
        rows = api.get("/rows/series", run=runs, **ask)["rows"]
        compared = api.get("/compare", run=runs, **ask)["runs"]
        for run in compared:
            own = [row for row in rows if row["run_id"] == run["run_id"]]
            for name in ("step", "min", "mean", "max", "nonfinite"):
                assert [row[name] for row in own] == run[name] != []
        assert len(rows) == sum(len(run["step"]) for run in compared)

    def test_take_the_runs_in_one_text_too(self, api, runs):
        ask = {"metric": "token_similarity", "layer": 0}
        assert api.get("/rows/series", run=",".join(runs), **ask) == api.get("/rows/series", run=runs, **ask)

    def test_name_runs_so_that_a_legend_tells_them_apart(self, api, runs):
        rows = api.get("/rows/series", run=runs, metric="token_similarity", layer=0)["rows"]
        assert [row["label"] for row in rows] == ["p/deep"] * 4 + ["default/shallow"] * 4

    @pytest.mark.parametrize("route", ["/compare", "/rows/series"])
    def test_are_of_the_last_layer_of_each_run(self, api, runs, route):
        found = api.get(route, run=runs, metric="token_similarity", layer=-1)
        if route == "/compare":
            found = {"rows": [{"mean": mean} for run in found["runs"] for mean in run["mean"]]}
        assert [row["mean"] for row in found["rows"]] == [0.75, 1.75, 2.75, 3.75, 2, 3, None, 5]

    def test_leave_out_runs_with_fewer_layers(self, api, runs):
        rows = api.get("/rows/series", run=runs, metric="token_similarity", layer=-4)["rows"]
        assert {row["run_id"] for row in rows} == {runs[0]}

    @pytest.mark.parametrize(
        ("ask", "status", "error"),
        [
            ({"run": ",".join(["a"] * 21)}, 422, "invalid_argument"),
            ({"run": "nope"}, 404, "unknown_run"),
            ({"layer": -9}, 404, "unknown_layer"),
            ({"layer": -(10**20)}, 422, "invalid_argument"),
            ({"layer": -(2**31), "run": ""}, 422, "invalid_argument"),
            ({"layer": 10**20}, 422, "invalid_argument"),
            ({"head": 10**20}, 422, "invalid_argument"),
            ({"metric": "loss", "layer": -1}, 404, "unknown_layer"),
            ({"from_step": "x"}, 422, "invalid_argument"),
            ({"from_step": -1}, 422, "invalid_argument"),
            ({"from_step": 2, "to_step": 1}, 422, "invalid_range"),
        ],
    )
    def test_tell_what_is_wrong_with_the_question(self, api, runs, ask, status, error):
        ask = {"run": runs, "metric": "token_similarity", "layer": 0} | ask
        assert problem(api.http.get("/api/v1/rows/series", params=ask))[:2] == (status, error)


class TestRowsOfNoRun:
    """As a panel asks before there is one to choose."""

    @pytest.mark.parametrize(
        ("route", "ask"),
        [
            ("/rows/series", {"metric": "loss"}),
            ("/rows/heatmap", {"metric": "token_similarity"}),
            ("/rows/metrics", {"kind": "layers"}),
            ("/rows/runs", {}),
        ],
    )
    def test_are_none(self, api, runs, route, ask):
        assert api.get(route, run="", **ask) == {"rows": []}


class TestRowsOfAHeatmap:
    def test_are_its_values(self, api, runs):
        heatmap = api.get(f"/runs/{runs[1]}/heatmap", metric="token_similarity")
        rows = api.get("/rows/heatmap", run=runs[1], metric="token_similarity")["rows"]
        expected = [
            {"step": step, "layer": layer, "value": value}
            for step, column in zip(heatmap["step"], heatmap["values"], strict=True)
            for layer, value in enumerate(column)
        ]
        assert rows == expected
        assert {"step": 2, "layer": 2, "value": None} in rows

    def test_are_logarithms_where_the_catalogue_has_a_log_scale(self, api):
        run_id = api.register(num_blocks=2)
        api.send_ok(run_id, [layer_frame(0, [0.01, 1.0, 0.0], "token_diversity")])
        ask = {"run": run_id, "metric": "token_diversity", "scale": "catalogue"}
        assert [row["value"] for row in api.get("/rows/heatmap", **ask)["rows"]] == [pytest.approx(-2), 0, -13]
        (row,) = api.get("/rows/series", layer=0, **ask)["rows"]
        assert (row["min"], row["mean"], row["max"]) == pytest.approx((-2, -2, -2))

    def test_are_the_values_themselves_where_it_has_none(self, api, runs):
        ask = {"run": runs[1], "metric": "token_similarity"}
        assert api.get("/rows/heatmap", scale="catalogue", **ask) == api.get("/rows/heatmap", **ask)

    @pytest.mark.parametrize("route", ["/rows/heatmap", "/rows/series"])
    def test_an_empty_step_is_none(self, api, runs, route):
        ask = {"run": runs[0], "metric": "token_similarity"} | ({"layer": 1} if route == "/rows/series" else {})
        assert api.get(route, from_step="", to_step="", **ask) == api.get(route, **ask)
        rows = api.get(route, from_step="1", to_step="", **ask)["rows"]
        assert {row["step"] for row in rows} == {1, 2, 3}
