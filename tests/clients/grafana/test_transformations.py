"""What panels are given in the end: Grafana's own transformations, in Node, on real replies."""

from __future__ import annotations

import contextlib
import functools
import math
from types import SimpleNamespace

import pytest

from tests.clients.grafana.dashboards import DASHBOARDS, filled, panels, place_of
from tests.clients.grafana.frames import Transformations, frame_of_rows, frames_of_tables, packages_missing

BY_STEP = [
    pytest.param(name, panel, id=place_of(name, panel))
    for name in DASHBOARDS
    for panel in panels(name)
    if panel["type"] == "trend"
]


@pytest.fixture(scope="module")
def transformations():
    missing = packages_missing()
    if missing is not None:
        pytest.skip(f"Grafana's packages for Node are not here: {missing}")
    with contextlib.closing(Transformations()) as found:
        yield found


@pytest.fixture(scope="module")
def shown(watched, values, transformations):
    """A function that gives the fields of the one frame that a panel shows."""

    def shown(panel, **others):
        frames = frames_of(panel, watched, values | others)
        (fields,) = transformations.applied(frames, panel["transformations"])
        return fields

    return shown


def frames_of(panel, watched, values):
    if panel["datasource"]["type"] == "prometheus":
        if watched.prometheus is None:
            pytest.skip("Prometheus is not installed; scripts/system_parts.py does it where it can")
        return frames_of_tables({target["refId"]: answer(target, watched, values) for target in panel["targets"]})
    return [frame_of_rows(target, rows(target, watched, values)) for target in panel["targets"]]


def answer(target, watched, values):
    start = watched.start if target.get("range") else None
    return watched.prometheus.ask(filled(target["expr"], values), start, watched.end)


def rows(target, watched, values):
    params = [(one["key"], filled(one["value"], values)) for one in target["url_options"]["params"]]
    return watched.rest(target["url"], params)[target["root_selector"]]


def log10_of(values):
    return [None if value is None else math.log10(max(value, 1e-13)) for value in values]


def panel_of(dashboard, title):
    (panel,) = (panel for panel in panels(dashboard) if panel["title"] == title)
    return panel


@pytest.mark.parametrize(("dashboard", "panel"), BY_STEP)
class TestEachTrend:
    def test_has_an_x_that_rises_and_lines_over_it(self, dashboard, panel, shown):
        fields = {field["name"]: field for field in shown(panel)}
        x = fields.pop(panel["options"]["xField"])
        assert x["type"] == "number"
        assert x["ascends"]
        assert len(x["values"]) > 2
        assert all(one < other for one, other in zip(x["values"], x["values"][1:], strict=False))
        assert fields
        for field in fields.values():
            assert field["type"] == "number", field["name"]
            assert any(value is not None for value in field["values"]), field["name"]


OF_THE_SERVICE = [
    pytest.param(panel, id=place_of(name, panel))
    for name in DASHBOARDS
    for panel in panels(name)
    if panel["type"] == "table" and panel["datasource"]["type"] != "prometheus"
]


@pytest.mark.parametrize("panel", OF_THE_SERVICE)
class TestEachTableOfTheService:
    def test_has_its_columns_in_the_order_of_the_query(self, panel, shown):
        (target,) = panel["targets"]
        order = [column["text"] for column in target["columns"]]
        assert [field["name"] for field in shown(panel)] == order != sorted(order)


class TestCurvesOfOneRun:
    def test_are_the_samples_as_the_service_has_them(self, shown, watched, values):
        fields = {field["name"]: field["values"] for field in shown(panel_of("run", "Norm of the gradient"))}
        told = watched.rest(f"/api/v1/runs/{values['run']}/series", {"metric": "total_grad_norm"})
        assert fields == {name: told[name] for name in ("step", "min", "mean", "max")}

    def test_know_that_the_last_layer_is_chosen(self, shown, watched, values):
        fields = {field["name"]: field["values"] for field in shown(panel_of("run", "${measure} of layer ${layer}"))}
        told = watched.rest(f"/api/v1/runs/{values['run']}/series", {"metric": "token_diversity", "layer": 24})
        assert (fields["step"], fields["mean"]) == (told["step"], log10_of(told["mean"]))


class TestTheHeatMap:
    @pytest.fixture
    def fields(self, shown):
        return shown(panel_of("run", "${measure}: layer x step"))

    def test_has_a_column_of_steps_first_and_then_one_for_each_layer(self, fields):
        assert [field["name"] for field in fields] == ["step", *map(str, range(25))]
        assert {field["type"] for field in fields} == {"number"}
        assert fields[0]["ascends"]

    def test_has_the_cells_as_the_service_has_them(self, fields, watched, values):
        told = watched.rest(f"/api/v1/runs/{values['run']}/heatmap", {"metric": "token_diversity"})
        assert fields[0]["values"] == told["step"]
        layers = [log10_of(layer) for layer in zip(*told["values"], strict=True)]
        assert [field["values"] for field in fields[1:]] == layers

    def test_would_not_be_taken_for_one_over_time(self, fields):
        """Where each name is a number, Grafana looks for a column of time among them."""
        with pytest.raises(ValueError, match="step"):
            float(fields[0]["name"])

    def test_leaves_a_hole_where_there_is_no_finite_value(self, shown, watched):
        run_id = watched.run_ids["div_nan-s0"]
        fields = shown(panel_of("run", "${measure}: layer x step"), run=run_id)
        told = watched.rest(f"/api/v1/runs/{run_id}/heatmap", {"metric": "token_diversity"})
        holes = [[value is None for value in column] for column in told["values"]]
        assert any(map(any, holes))
        assert not all(map(all, holes))
        assert [[value is None for value in field["values"]] for field in fields[1:]] == [
            list(layer) for layer in zip(*holes, strict=True)
        ]


class TestTheProfile:
    def test_has_a_line_over_the_layers_for_each_span_of_steps(self, shown, watched, values):
        fields = shown(panel_of("run", "${measure}: profile over the layers"))
        told = watched.rest(f"/api/v1/runs/{values['run']}/heatmap", {"metric": "token_diversity", "columns": 6})
        assert [field["name"] for field in fields] == ["layer", *map(str, told["step"])]
        assert fields[0]["values"] == [*range(25)]
        assert [field["values"] for field in fields[1:]] == [log10_of(span) for span in told["values"]]


class TestTheComparison:
    def test_has_a_line_for_each_run_whatever_its_steps_are(self, shown, watched):
        fields = {field["name"]: field["values"] for field in shown(panel_of("compare", "${number}"))}
        steps = fields.pop("step")
        assert set(fields) == {f"recorded/{name}" for name in watched.run_ids}
        told = watched.rest(
            "/api/v1/compare", {"run": [*watched.run_ids.values()], "metric": "total_grad_norm", "points": 500}
        )
        for run in told["runs"]:
            line = dict(zip(steps, fields[f"recorded/{run['run']}"], strict=True))
            assert [line[step] for step in run["step"]] == run["mean"]
            assert all(line[step] is None for step in steps if step not in run["step"])

    def test_takes_models_of_any_depth(self, shown, watched):
        panel = panel_of("compare", "${measure} of layer ${layer}")
        fields = {field["name"]: field["values"] for field in shown(panel)}
        assert set(fields) == {"step", *(f"recorded/{name}" for name in watched.run_ids)}


class TestCurvesFromPrometheusAlone:
    """Each scrape that comes before the next sample repeats a step."""

    def test_have_each_step_once_with_its_last_value(self, shown, watched, prometheus, values):
        fields = {field["name"]: field["values"] for field in shown(of_prometheus("Loss"))}
        of_run = f'{{run_id="{values["run"]}"}}'
        scraped = {}
        for name in ("tsemon_run_step", "tsemon_run_loss"):
            (series,) = prometheus.ask(f"max by (run_id) ({name}{of_run})", watched.start, watched.end)
            scraped[name] = {time: float(value) for time, value in series["values"]}
        steps = [step for time, step in scraped["tsemon_run_step"].items() if time in scraped["tsemon_run_loss"]]
        assert len(set(steps)) < len(steps), "no step was scraped twice: this proves nothing"
        last = {
            step: scraped["tsemon_run_loss"][time]
            for time, step in scraped["tsemon_run_step"].items()
            if time in scraped["tsemon_run_loss"]
        }
        assert fields["step"] == sorted(set(steps))
        assert fields["loss"] == [last[step] for step in fields["step"]]

    def test_would_not_be_drawn_without_the_grouping(self, watched, prometheus, values, transformations):
        panel = of_prometheus("Loss")
        joined = [step for step in panel["transformations"] if step["id"] == "joinByField"]
        (fields,) = transformations.applied(frames_of(panel, watched, values), joined)
        (step,) = (field for field in fields if field["name"] == "Value #A")
        assert not step["ascends"]

    def test_put_a_run_that_went_back_in_order(self, transformations):
        """As after a checkpoint: 10, 20, 30, then 20 again."""
        seconds = [1.8e9 + number for number in range(4)]
        told = {"A": [10, 20, 30, 20], "B": [4.0, 3.0, 9.0, 2.0]}
        answers = {
            letter: [
                {"metric": {"run_id": "a"}, "values": [[at, str(one)] for at, one in zip(seconds, ones, strict=True)]}
            ]
            for letter, ones in told.items()
        }
        (fields,) = transformations.applied(frames_of_tables(answers), of_prometheus("Loss")["transformations"])
        assert [(field["name"], field["values"]) for field in fields] == [("step", [10, 20, 30]), ("loss", [4, 2, 9])]


@functools.cache
def of_prometheus(title):
    (panel,) = (
        panel
        for panel in panels("run")
        if panel["title"] == title and panel["type"] == "trend" and panel["datasource"]["type"] == "prometheus"
    )
    return panel


class TestTheTablesOfTheFleet:
    def test_have_a_row_for_each_run_with_all_its_columns(self, shown, watched, prometheus):
        fields = {field["name"]: field["values"] for field in shown(panel_of("fleet", "Runs now"))}
        assert [*fields][:4] == ["Project", "Run", "Step", "Loss"]
        assert sorted(fields["Run"]) == sorted(watched.run_ids)
        assert dict(zip(fields["Run"], fields["run_id"], strict=True)) == watched.run_ids
        assert set(fields) == {
            "Project",
            "Run",
            "Step",
            "Loss",
            "Diversity",
            "NaN or Inf",
            "Since heard of",
            "Since it moved",
            "run_id",
        }
        row = SimpleNamespace(**dict(zip(fields["Run"], fields["NaN or Inf"], strict=True)))
        assert vars(row)["div_nan-s0"] > 0
        assert vars(row)["lm_pre4-s0"] == 0

    def test_have_a_row_for_each_incident(self, shown, watched, prometheus):
        fields = {field["name"]: field["values"] for field in shown(panel_of("fleet", "Incidents that are open now"))}
        names = ["severity", "rule", "family", "blocks", "project", "run", "run_id", "incident_id"]
        assert [*fields] == names
        rows = {tuple(row) for row in zip(*(fields[name] for name in names if name != "blocks"), strict=True)}
        assert rows == {tuple(one[name] for name in names if name != "blocks") for one in watched.incidents}
        where = dict(zip(fields["incident_id"], fields["blocks"], strict=True))
        assert [where[one["incident_id"]] for one in watched.incidents if one["blocks"]] == [
            "-".join(map(str, one["blocks"])) for one in watched.incidents if one["blocks"]
        ]
