"""A metric of the user's own, from `attach(measures=[Quantity(...)])` to REST, /metrics, a rule and the page."""

import csv
import io
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import expect
from prometheus_client.parser import text_string_to_metric_families

import tsemon
from tests import zoo
from tests.tsemon.probes.probing import hidden_states
from tsemon_server.settings import MetricsSettings, Settings

from .conftest import num_coloured, opened, served

EXAMPLE = runpy.run_path(str(Path(__file__).parents[3] / "examples/own_quantity.py"))
KURTOSIS = EXAMPLE["KURTOSIS"]
RULE = {
    "name": "heavy-tails",
    "family": "norm",
    "severity": "warning",
    "title": "A few entries of the hidden state dominate it",
    "when": {"value": [{"layers": "hidden_kurtosis"}, {"layers": "max"}], "above": 20},
    "for": {"samples": 2, "steps": 2},
    "advice": "Look at the widest layer norm.",
    "source": "a test",
    "origin": "a test",
}
STEPS = range(0, 12, 2)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('own')}/tsemon.db"


@pytest.fixture(scope="module")
def service(server, database):
    with server.showing(Settings(database=database)) as service:
        yield service


@pytest.fixture(scope="module")
def states():
    """What plain hooks saw of the sampled steps: (samples, entries, batch, tokens, width)."""
    return []


@pytest.fixture(scope="module")
def run_id(service, states, tmp_path_factory):
    """A model whose hidden states have an entry that grows from step to step."""
    service.request("PUT", "/api/v1/rules/heavy-tails", json=RULE).raise_for_status()
    torch.manual_seed(0)
    model, forward = zoo.our_vision_transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    folder = tmp_path_factory.mktemp("spool")
    with tsemon.attach(
        model, optimizer, run="tails", server=service.url, every=2, measures=[KURTOSIS], spool_dir=folder
    ) as monitor:
        for step in range(STEPS.stop):
            with torch.no_grad():
                model.blocks[1].norm2.bias[3] += 2.0
                if step in STEPS:
                    states.append(torch.stack(hidden_states(model, forward)).numpy())
            loss = forward().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss)
        assert monitor.status.num_faults == 0
        assert "hidden_kurtosis" not in monitor.status.not_measured
    (run,) = service.request("GET", "/api/v1/runs?state=finished").json()["runs"]
    return run["run_id"]


@pytest.fixture(scope="module")
def expected(run_id, states):
    """(samples, entries) by the definition."""
    x = np.stack(states)
    centred = x - x.mean(axis=(-2, -1), keepdims=True)
    moments = [(centred**power).mean(axis=(-2, -1)) for power in (4, 2)]
    return (moments[0] / moments[1] ** 2).mean(axis=-1)


def exported(database, **settings):
    """What /metrics shows of the run, which has ended, by family."""
    metrics = MetricsSettings(grace_s=3600, **settings)
    with served(Settings(database=database, metrics=metrics)) as service:
        families = text_string_to_metric_families(service.request("GET", "/metrics").text)
        return {family.name: family for family in families}


def get(service, path, **query):
    answer = service.request("GET", f"/api/v1{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer


class TestAQuantityOfTheUsersOwn:
    def test_is_described_by_its_run(self, service, run_id):
        run = get(service, f"/runs/{run_id}").json()
        assert run["metrics"]["layers"]["hidden_kurtosis"] == 4
        described = run["quantities"]["hidden_kurtosis"]
        assert described["title"] == "kurtosis of the hidden state"
        assert (described["axis"], described["low"], described["high"], described["log_scale"]) == (
            "activation",
            1.0,
            None,
            True,
        )

    def test_is_a_series_a_heat_map_a_row_and_a_column_over_rest(self, service, run_id, expected):
        where = f"/runs/{run_id}"
        series = get(service, f"{where}/series", metric="hidden_kurtosis", layer=-1).json()
        assert series["step"] == [*STEPS]
        assert series["mean"] == pytest.approx(expected[:, -1], rel=1e-4)
        heatmap = get(service, f"{where}/heatmap", metric="hidden_kurtosis").json()
        np.testing.assert_allclose(heatmap["values"], expected, rtol=1e-4)
        compared = get(service, "/compare", run=run_id, metric="hidden_kurtosis", layer=2).json()
        assert compared["runs"][0]["mean"] == pytest.approx(expected[:, 2], rel=1e-4)
        frame = get(service, f"{where}/frame", step=STEPS[-1]).json()
        assert frame["layers"]["hidden_kurtosis"] == pytest.approx(expected[-1], rel=1e-4)
        table = csv.DictReader(
            io.StringIO(get(service, f"{where}/export", format="csv", metric="hidden_kurtosis").text)
        )
        values = [float(row["value"]) for row in table]
        np.testing.assert_allclose(sorted(values), sorted(expected.ravel()), rtol=1e-4)

    def test_is_exported_to_prometheus_over_all_layers(self, database, run_id, expected):
        families = exported(database)
        assert "tsemon_layer_hidden_kurtosis" not in families
        highest = families["tsemon_layers_hidden_kurtosis_max"]
        assert highest.documentation == "Largest value over layers: kurtosis of the hidden state"
        for name, value in (("min", min), ("mean", np.mean), ("max", max), ("last", lambda values: values[-1])):
            (sample,) = families[f"tsemon_layers_hidden_kurtosis_{name}"].samples
            assert sample.value == pytest.approx(value(expected[-1]), rel=1e-4)

    def test_is_exported_to_prometheus_by_layer_if_the_settings_name_it(self, database, run_id, expected):
        layers = exported(database, layers=("hidden_kurtosis",))["tsemon_layer_hidden_kurtosis"]
        assert layers.documentation == "kurtosis of the hidden state, by layer"
        assert [sample.value for sample in layers.samples] == pytest.approx(expected[-1], rel=1e-4)

    def test_makes_a_rule_fire(self, service, run_id, expected):
        over = [step for step, values in zip(STEPS, expected, strict=True) if values.max() > 20]
        (alert,) = get(service, "/alerts", rule="heavy-tails").json()["alerts"]
        assert (alert["pending_step"], alert["firing_step"]) == (over[0], over[1])
        assert "hidden_kurtosis" in str(alert["evidence"])

    def test_is_on_the_page(self, browser, service, run_id):
        with opened(browser, service) as page:
            page.set_viewport_size({"width": 1280, "height": 1500})
            page.goto(f"/#/run/{run_id}")
            page.get_by_label("metric", exact=True).select_option("hidden_kurtosis")
            expect(page.get_by_text(re.compile("kurtosis of the hidden state: mean of"))).to_be_visible()
            expect(page.get_by_label("logarithmic")).to_be_checked()
            expect(page.locator("[aria-busy=true]")).to_have_count(0)
            expect(page.get_by_text("hidden_kurtosis by layer and step")).to_be_visible()
            with page.expect_download() as picture:
                page.get_by_role("button", name="Heat map as PNG").click()
            assert num_coloured(picture.value) > 1000
            expect(page.get_by_text("heavy-tails").first).to_be_visible()
            page.goto(f"/#/compare?run={run_id}&metric=hidden_kurtosis&layer=2")
            expect(page.get_by_role("img", name="hidden_kurtosis by layer of 1 run")).to_be_visible()
