"""The range of healthy runs, behind the token diversity of a run."""

import gzip
import json
import math

import numpy as np
import pytest
from playwright.sync_api import expect

from scripts.healthy_band import FILE, band
from tsemon.wire import Array, Frame
from tsemon_answers.healthy import farthest_below

from .conftest import START_S, option_of

DIVERSITY = 0.9, 0.8, 0.5, 0.2, 1e-6
CAPTION = "Green: range at the same relative depth in 32 healthy recorded runs."


def expected(num_layers):
    """Low and high of each layer, by straight lines between the logarithms in the file."""
    found = json.loads(FILE.read_text())["token_diversity"]
    depths = np.linspace(0, 1, num_layers)
    known = np.linspace(0, 1, len(found["low"]))
    return [10 ** np.interp(depths, known, np.log10(found[end])) for end in ("low", "high")]


@pytest.fixture
def run_id(service):
    run_id = service.register("gpt")
    layers = {"token_diversity": Array.of(DIVERSITY), "grad_norm": Array.of([1.0] * 4)}
    service.send(run_id, *(Frame(step, step, START_S + step, {"loss": 1.0}, layers) for step in range(3)))
    return run_id


def band_in(chart, name="healthy"):
    """Where the band is, its lower and its upper edge, which is drawn as a height; None without a band."""
    ids, data = option_of(chart, "series", "id"), option_of(chart, "series", "data")
    if f"{name} low" not in ids:
        return None
    low, height = (np.array(data[ids.index(f"{name} {edge}")]) for edge in ("low", "high"))
    assert (low[:, 0] == height[:, 0]).all()
    return low[:, 0].tolist(), low[:, 1], low[:, 1] + height[:, 1]


def open_page(page, address):
    page.goto(address)
    expect(page.locator("[aria-busy=true]")).to_have_count(0)


class TestTheProfile:
    def chart(self, page):
        return page.get_by_role("img", name="Value by layer at the chosen step")

    def test_has_the_range_at_the_relative_depth_of_each_layer_and_says_of_which_runs(self, page, run_id):
        open_page(page, f"/#/run/{run_id}")
        expect(page.get_by_text(CAPTION)).to_be_visible()
        layers, low, high = band_in(self.chart(page))
        assert layers == [0, 1, 2, 3, 4]
        assert [low, high] == pytest.approx(np.array(expected(5)))

    def test_names_the_range_under_the_pointer(self, page, run_id):
        open_page(page, f"/#/run/{run_id}")
        box = self.chart(page).bounding_box()
        self.chart(page).hover(position={"x": box["width"] - 20, "y": box["height"] / 2})
        expect(self.chart(page).locator(".tip")).to_contain_text("healthy runs0.00295 to 1")

    def test_has_none_of_other_metrics(self, page, run_id):
        open_page(page, f"/#/run/{run_id}?metric=grad_norm")
        expect(page.get_by_role("heading", name="grad_norm at step 2")).to_be_visible()
        expect(page.get_by_text("healthy recorded runs")).to_be_hidden()
        assert band_in(self.chart(page)) is None


class TestTheColorScaleOfTheHeatMap:
    def test_marks_the_range_over_all_depths(self, page, run_id):
        open_page(page, f"/#/run/{run_id}")
        expect(page.get_by_text("healthy runs, 0.00295 to 1 by depth")).to_be_visible()
        bar, mark = (page.locator(of).bounding_box() for of in (".legend .bar", ".bar .healthy"))
        start = 1 - math.log10(0.00295) / math.log10(min(DIVERSITY))
        assert (mark["x"] - bar["x"]) / bar["width"] == pytest.approx(start, abs=0.01)
        assert mark["x"] + mark["width"] == pytest.approx(bar["x"] + bar["width"], abs=0.5)
        assert mark["height"] > 0

    def test_has_none_of_other_metrics(self, page, run_id):
        open_page(page, f"/#/run/{run_id}?metric=grad_norm")
        expect(page.locator(".legend .bar")).to_be_visible()
        expect(page.locator(".legend .healthy")).to_have_count(0)


class TestTheHistoryOfALayer:
    def test_has_the_range_of_this_layer_over_all_steps(self, page, run_id):
        open_page(page, f"/#/run/{run_id}?metric=token_diversity&layer=3")
        chart = page.get_by_role("application")
        expect(chart.get_by_role("heading", name="layer 3 · h.2 healthy runs log")).to_be_visible()
        steps, low, high = band_in(chart, "history healthy")
        assert steps[0] == 0
        assert steps[1] >= 2
        assert [low[0], high[0]] == pytest.approx([edge[3] for edge in expected(5)])
        assert low[0] == low[1]


class TestTheComparison:
    @pytest.fixture
    def deep_id(self, service):
        run_id = service.register("deep", num_blocks=8)
        layers = {"token_diversity": Array.of([0.5] * 9)}
        service.send(run_id, *(Frame(step, step, START_S + step, {"loss": 1.0}, layers) for step in range(3)))
        return run_id

    def test_has_the_range_of_the_last_layer_and_that_of_each_profile(self, page, run_id, deep_id):
        open_page(page, f"/#/compare?run={run_id}&run={deep_id}&metric=token_diversity&layer=-1")
        expect(page.get_by_text(CAPTION)).to_have_count(2)
        _, low, high = band_in(page.locator(".chart", has=page.locator("canvas")).first)
        assert [low[0], high[0]] == pytest.approx([0.00295, 1.0])
        profiles = page.get_by_role("img", name="token_diversity by layer of 2 runs")
        for i, num_layers in enumerate((5, 9)):
            layers, low, _ = band_in(profiles, f"healthy {i}")
            assert layers == [*range(num_layers)]
            assert low == pytest.approx(expected(num_layers)[0])

    def test_names_powers_of_ten_over_many_decades(self, page, service):
        for name, diversity in (("healthy", 0.5), ("failing", 1e-10)):
            layers = {"token_diversity": Array.of([0.9] * 4 + [diversity])}
            service.send(service.register(name), Frame(1, 1, START_S, {}, layers))
        runs = service.request("GET", "/api/v1/runs").json()["runs"]
        query = "&".join(f"run={run['run_id']}" for run in runs)
        open_page(page, f"/#/compare?{query}&metric=token_diversity&layer=-1")
        chart = page.locator(".chart", has=page.locator("canvas")).first
        (label,) = option_of(chart, "yAxis", "axisLabel")
        assert label["customValues"] == pytest.approx([1, 1e-3, 1e-6, 1e-9])

    def test_has_none_where_the_layer_lies_at_different_depths(self, page, run_id, deep_id):
        open_page(page, f"/#/compare?run={run_id}&run={deep_id}&metric=token_diversity&layer=2")
        expect(page.get_by_text(CAPTION)).to_have_count(1)

    def test_has_none_of_a_difference(self, page, run_id, deep_id):
        open_page(page, f"/#/compare?run={run_id}&run={deep_id}&metric=token_diversity&layer=-1&baseline={deep_id}")
        expect(page.get_by_text(CAPTION)).to_have_count(1)


class TestTheRange:
    @pytest.mark.parametrize("num_layers", [2, 5, 49])
    def test_is_the_same_for_python(self, num_layers):
        low, _ = expected(num_layers)
        assert farthest_below("token_diversity", [1.001 * edge for edge in low]) is None
        for layer in range(num_layers):
            below = [1.001 * edge if i != layer else 0.999 * edge for i, edge in enumerate(low)]
            assert farthest_below("token_diversity", below) == layer

    def test_is_of_healthy_runs_after_their_first_tenth_each_with_the_same_weight(self, tmp_path):
        def record(name, diversities, failing=False, gray=False):
            header = {"t": "run", "failing": failing, "gray": gray}
            frames = [
                {"t": "frame", "step": 10 * i, "layers": {"token_diversity": values}}
                for i, values in enumerate(diversities)
            ]
            with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
                file.write("\n".join(map(json.dumps, (header, *frames))))

        record("short", [[1e-9, 1e-9]] + [[1.0, 1e-2]] * 10)
        record("long", [[1e-9] * 3] * 20 + [[1e-2] * 3] * 180)
        record("failing", [[1e-12] * 3] * 10, failing=True)
        record("odd", [[1e-12] * 3] * 10, gray=True)
        assert band(tmp_path)["token_diversity"] == {
            "runs": 2,
            "low": [0.01] * 11,
            "high": [pytest.approx(10 ** (-2 * depth / 10), rel=0.01) for depth in range(11)],
        }
