"""Every question to Prometheus, asked of a real one that has scraped recorded runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess

import pytest
import yaml

from tests.clients.grafana.dashboards import DASHBOARDS, RULES, filled, panels, queries
from tests.clients.grafana.watched import RULES_OF_PROMETHEUS

OF_PROMETHEUS = [query for query in queries() if query.is_of_prometheus]


def numbers(series):
    values = [value for one in series for _, value in one.get("values", [one.get("value")])]
    return [number for number in map(float, values) if not math.isnan(number)]


@pytest.mark.parametrize("query", OF_PROMETHEUS, ids=str)
class TestEachPanel:
    def test_shows_something(self, query, watched, prometheus, values):
        expr = filled(query.target["expr"], values)
        is_over_time = query.target.get("range") is True
        found = prometheus.ask(expr, watched.start if is_over_time else None, watched.end)
        assert numbers(found), expr

    def test_names_only_labels_that_the_series_have(self, query, watched, prometheus, values):
        names = re.findall(r"{{(\w+)}}", query.target["legendFormat"])
        found = prometheus.ask(filled(query.target["expr"], values), watched.start, watched.end)
        for name in names:
            assert all(name in one["metric"] for one in found), f"{name}: {found[:1]}"


class TestTheFiguresOfTheFleet:
    """Each run and alert counts once, though two services tell of it."""

    @pytest.fixture
    def figures(self, watched, prometheus, values):
        found = {}
        for panel in panels("fleet"):
            if panel["type"] == "stat":
                (series,) = prometheus.ask(filled(panel["targets"][0]["expr"], values), end=watched.end)
                found[panel["title"]] = float(series["value"][1])
        return found

    def test_are_those_of_the_service(self, figures, watched):
        firing = watched.rest("/api/v1/alerts", {"state": "firing", "limit": 1000})["alerts"]
        assert figures == {
            "Runs": len(watched.run_ids),
            "Alerts that fire": len(firing),
            "Runs with NaN or Inf": 1,
            "Silent runs": 0,
        }


class TestTheVariable:
    def test_has_the_projects(self, prometheus):
        (variable,) = DASHBOARDS["fleet"]["templating"]["list"]
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()
        assert {one["metric"][label] for one in prometheus.ask(metric)} == {"recorded"}


def fires(rule, prometheus, end):
    """The labels of the series on which the rule's condition is met: a query, and a threshold on it."""
    query, threshold = rule["data"]
    (condition,) = threshold["model"]["conditions"]
    assert condition["evaluator"]["type"] == "gt"
    (bound,) = condition["evaluator"]["params"]
    return [
        one["metric"]
        for one in prometheus.ask(query["model"]["expr"], end=end)
        if float(one["value"][1]) > bound  # NaN is not
    ]


class TestEachAlertRule:
    @pytest.mark.parametrize(
        ("name", "runs"),
        [
            ("TsemonTokenSimilarityEscalation", {"tse_vit24-s0"}),
            ("TsemonEntropyCollapse", {"ent_qk20-s0"}),
            ("TsemonNonFinite", {"div_nan-s0"}),
            ("TsemonRunStalled", set()),
            ("TsemonRunSilent", set()),
        ],
    )
    def test_fires_on_the_runs_that_it_is_for(self, name, runs, watched, prometheus):
        (rule,) = (rule for rule in RULES if rule["title"] == name)
        assert {labels["run"] for labels in fires(rule, prometheus, watched.end)} == runs

    def test_says_of_which_runs_what_prometheus_own_says(self, watched, prometheus):
        """Those of clients/prometheus, with the same names. Pending there: they have to hold for longer than this lasts."""
        own = {
            (one["metric"]["alertname"], one["metric"].get("run")) for one in prometheus.ask("ALERTS", end=watched.end)
        }
        told = {(rule["title"], labels.get("run")) for rule in RULES for labels in fires(rule, prometheus, watched.end)}
        assert told == own != set()

    def test_has_the_severity_and_the_wait_of_prometheus_own(self):
        groups = yaml.safe_load((RULES_OF_PROMETHEUS / "alerts.yml").read_text())["groups"]
        own = {rule["alert"]: rule for group in groups for rule in group["rules"]}
        assert {rule["title"] for rule in RULES} == {*own}
        for rule in RULES:
            assert rule["labels"] == own[rule["title"]].get("labels", {}), rule["title"]
            assert rule["for"] == own[rule["title"]].get("for", "0s"), rule["title"]

    def test_relays_what_the_service_says(self, watched, prometheus):
        (rule,) = (rule for rule in RULES if rule["title"] == "TsemonAlertFiring")
        told = {(labels["run"], labels["rule"], labels["severity"]) for labels in fires(rule, prometheus, watched.end)}
        alerts = watched.rest("/api/v1/alerts", {"state": "firing", "limit": 1000})["alerts"]
        assert told == {(alert["run"], alert["rule"], alert["severity"]) for alert in alerts} != set()

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["title"])
    def test_has_the_labels_that_its_text_names(self, rule, watched, prometheus):
        expr = rule["data"][0]["model"]["expr"]
        names = {name for text in rule["annotations"].values() for name in re.findall(r"\.Labels\.(\w+)", text)}
        found = prometheus.ask(expr, end=watched.end)
        assert found
        assert all(names <= {*one["metric"]} for one in found)


RUN = '{run_id="a", project="p", run="r"}'
HEARD, STEPPED = (f'tsemon_run_{name}_timestamp_seconds{{run_id="a"}}' for name in ("last_seen", "stepped"))
FAILED, SENT = (f'tsemon_notifications_total{{receiver="r", outcome="{outcome}"}}' for outcome in ("failed", "sent"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed; it comes with Prometheus")
class TestTheRulesOnTheClock:
    """In promtool's time: a value a minute."""

    @pytest.mark.parametrize(
        ("name", "series", "quiet_at", "firing_at"),
        [
            # Heard of at 0 and never again: after 5 minutes it is silent, after 2 more that fires.
            ("TsemonRunSilent", {HEARD: "0x20"}, "6m", "8m"),
            # Heard of every minute, always at the step of minute 0.
            ("TsemonRunStalled", {HEARD: "0+60x40", STEPPED: "0x40"}, "15m", "18m"),
            ("TsemonDown", {'up{job="tsemon", instance="i"}': "1 1 0x20"}, "2m", "4m"),
            ("TsemonLeftOut", {'tsemon_exposition_left_out{what="runs"}': "0 0 3x20"}, "3m", "5m"),
            ("TsemonNotificationsFail", {FAILED: "0+1x40"}, "5m", "7m"),
        ],
    )
    def test_fire_once_it_is_long_enough(self, name, series, quiet_at, firing_at, tmp_path):
        promtool(tmp_path, name, series, {quiet_at: 0, firing_at: 1})

    @pytest.mark.parametrize(
        ("name", "series", "at"),
        [
            # Steps until minute 4, is heard of until minute 25, and then not any more: silent, and not stuck.
            ("TsemonRunStalled", {HEARD: "0+60x25 1500x30", STEPPED: "0+60x4 240x50"}, "40m"),
            ("TsemonRunSilent", {HEARD: "0+60x40"}, "30m"),
            ("TsemonLeftOut", {'tsemon_exposition_left_out{what="series"}': "48x40"}, "30m"),
            ("TsemonNotificationsFail", {FAILED: "0+1x40", SENT: "0+1x40"}, "30m"),
        ],
    )
    def test_leave_others_alone(self, name, series, at, tmp_path):
        promtool(tmp_path, name, series, {at: 0})


def promtool(folder, name, series, num_alerts_at):
    """Fails unless so many alerts fire at each time, with the rule as Prometheus would have it."""
    (rule,) = (rule for rule in RULES if rule["title"] == name)
    query, threshold = (one["model"] for one in rule["data"])
    bound = threshold["conditions"][0]["evaluator"]["params"][0]
    alert = {"alert": name, "expr": f"({query['expr']}) > {bound}", "for": rule["for"]}
    (folder / "rules.yml").write_text(json.dumps({"groups": [{"name": "g", "rules": [alert]}]}))
    asked = [
        {
            "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
            "eval_time": at,
            "exp_samples": [{"labels": "{}", "value": number}],
        }
        for at, number in num_alerts_at.items()
    ]
    given = [{"series": f"tsemon_run_info{RUN}", "values": "1x60"}]
    given += [{"series": one, "values": values} for one, values in series.items()]
    test = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, "promql_expr_test": asked}],
    }
    (folder / "test.yml").write_text(json.dumps(test))
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
