"""Every question to Prometheus, asked of a real one that has scraped recorded runs."""

from __future__ import annotations

import math
import re

import pytest

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
    """The labels of the series that are above zero, as the rule's condition is."""
    found = prometheus.ask(rule["data"][0]["model"]["expr"], end=end)
    return [one["metric"] for one in found if float(one["value"][1]) > 0]  # NaN is not


class TestTheAlertRules:
    def test_forward_what_the_rules_of_the_server_say(self, watched, prometheus):
        (rule,) = (rule for rule in RULES if rule["title"] == "TsemonAlertFiring")
        names = ("project", "run", "run_id", "rule", "family", "severity")
        told = {tuple(labels[name] for name in names) for labels in fires(rule, prometheus, watched.end)}
        alerts = watched.rest("/api/v1/alerts", {"state": "firing", "limit": 1000})["alerts"]
        assert told == {tuple(alert[name] for name in names) for alert in alerts}
        found = {(run, rule, family, severity) for _, run, _, rule, family, severity in told}
        assert found >= {
            ("tse_vit24-s0", "token-similarity-escalation", "tse", "critical"),
            ("ent_qk20-s0", "attention-entropy-collapse", "entropy", "critical"),
            ("div_nan-s0", "loss-not-finite", "loss", "critical"),
        }
        assert "lm_pre4-s0" not in {run for run, *_ in found}

    def test_say_of_which_runs_what_prometheus_own_say(self, watched, prometheus):
        """Those of clients/prometheus. Some are pending there, which take longer than this."""
        own = {
            (one["metric"]["alertname"], one["metric"].get("run"), one["metric"].get("rule"))
            for one in prometheus.ask("ALERTS", end=watched.end)
        }
        told = {
            (rule["title"], labels.get("run"), labels.get("rule"))
            for rule in RULES
            for labels in fires(rule, prometheus, watched.end)
        }
        assert told == own
        assert {name for name, *_ in own} == {"TsemonAlertFiring", "TsemonNotificationsFail"}

    def test_read_series_and_labels_that_there_are(self, watched, prometheus):
        """Those that promtool's tests of Prometheus's rules make up."""
        tests = (RULES_OF_PROMETHEUS.parent / "tests/alerts.test.yml").read_text()
        for name, labels in sorted({*re.findall(r"'(\w+)\{(.*?)\}'", tests)}):
            found = prometheus.ask(name, end=watched.end)
            assert found, name
            assert {*re.findall(r"(\w+)=", labels)} <= {*found[0]["metric"]}, name

    def test_name_labels_that_the_series_have(self, watched, prometheus):
        for rule in RULES:
            text = " ".join(rule["annotations"].values())
            for labels in fires(rule, prometheus, watched.end):
                assert {*re.findall(r"\.Labels\.(\w+)", text)} <= {*labels}
