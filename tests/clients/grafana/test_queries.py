"""Every query, sent to a real service that holds recorded runs, and to a real Prometheus that has scraped it."""

from __future__ import annotations

import datetime
import math
import re

import pytest

from tests.clients.grafana.dashboards import DASHBOARDS, RULES, filled, panels, queries
from tests.clients.grafana.watched import RULES_OF_PROMETHEUS

OF_PROMETHEUS = [query for query in queries() if query.is_of_prometheus]
OF_REST = [query for query in queries() if not query.is_of_prometheus]


def numbers(series):
    values = [value for one in series for _, value in one.get("values", [one.get("value")])]
    return [number for number in map(float, values) if not math.isnan(number)]


@pytest.mark.parametrize("query", OF_PROMETHEUS, ids=str)
class TestEachQueryToPrometheus:
    def test_shows_something(self, query, watched, prometheus, values):
        expr = filled(query.target["expr"], values)
        is_over_time = query.target.get("range") is True
        found = prometheus.ask(expr, watched.start if is_over_time else None, watched.end)
        assert numbers(found), expr

    def test_names_only_labels_that_the_series_have(self, query, watched, prometheus, values):
        names = re.findall(r"{{(\w+)}}", query.target["legendFormat"])
        found = prometheus.ask(filled(query.target["expr"], values), watched.start, watched.end)
        for name in {*names} - {"stack"}:  # empty, so not there, for a model with one stack
            assert all(name in one["metric"] for one in found), f"{name}: {found[:1]}"


class TestTheFiguresOfTheFleet:
    """Each run and incident counts once, though two servers report it."""

    @pytest.fixture
    def figures(self, watched, prometheus, values):
        found = {}
        for panel in panels("fleet"):
            if panel["type"] == "stat":
                (series,) = prometheus.ask(filled(panel["targets"][0]["expr"], values), end=watched.end)
                found[panel["title"]] = float(series["value"][1])
        return found

    def test_are_those_of_the_service(self, figures, watched):
        assert figures == {
            "Runs": len(watched.run_ids),
            "Open incidents": len(watched.incidents),
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
        (rule,) = (rule for rule in RULES if rule["title"] == "TsemonIncident")
        names = ("project", "run", "run_id", "incident_id", "rule", "family", "severity")
        told = {tuple(labels[name] for name in names) for labels in fires(rule, prometheus, watched.end)}
        assert told == {tuple(incident[name] for name in names) for incident in watched.incidents}
        found = {(run, rule, family, severity) for _, run, _, _, rule, family, severity in told}
        assert found >= {
            ("tse_vit24-s0", "token-similarity-escalation", "tse", "critical"),
            ("ent_qk20-s0", "attention-block-entropy-collapse", "entropy", "critical"),
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
        assert {name for name, *_ in own} == {"TsemonIncident", "TsemonNotificationsFail"}

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


def column_of(rows, column):
    """The values of one column: the selector is a path of keys."""
    values = []
    for row in rows:
        value = row
        for key in column["selector"].split("."):
            value = value[key]  # KeyError: there is no such key
        values.append(value)
    return values


def rows_of(query, watched, values):
    """The rows of the reply."""
    params = [(one["key"], filled(one["value"], values)) for one in query.target["url_options"]["params"]]
    rows = watched.rest(filled(query.target["url"], values), params)[query.target["root_selector"]]
    assert isinstance(rows, list)
    return rows


def is_moment(text):
    return datetime.datetime.fromisoformat(text).tzinfo is not None


KINDS = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "timestamp": lambda value: isinstance(value, str) and is_moment(value),
}


@pytest.mark.parametrize("query", OF_REST, ids=str)
class TestEachQueryToTheService:
    def test_gets_rows(self, query, watched, values):
        assert rows_of(query, watched, values)

    def test_finds_each_column_and_values_of_its_kind(self, query, watched, values):
        rows = rows_of(query, watched, values)
        for column in query.target["columns"]:
            found = [value for value in column_of(rows, column) if value is not None]
            assert all(map(KINDS[column["type"]], found)), column
            # What still fires or is open is not over at any step; all else is there.
            assert found or column["selector"] in ("resolved_step", "ended_step"), f"nothing but null in {column}"

    def test_asks_the_parser_that_runs_in_the_backend(self, query, watched, values):
        told = {key: query.target[key] for key in ("type", "source", "parser", "format")}
        assert told == {"type": "json", "source": "url", "parser": "backend", "format": "table"}
        assert query.target["url"].startswith("/api/v1/")
        assert query.target["url_options"]["method"] == "GET"


class TestTheChoiceOfSteps:
    def test_cuts_every_chart_by_step(self, watched, values):
        zoomed = values | {"from_step": "50", "to_step": "100"}
        asked = [
            query for query in OF_REST if "/rows/series" in query.target["url"] or "/heatmap" in query.target["url"]
        ]
        assert len(asked) > 10
        for query in asked:
            steps = {row["step"] for row in rows_of(query, watched, zoomed)}
            assert steps, query
            assert 50 <= min(steps) <= max(steps) <= 100


class TestTheChoiceOfRuns:
    def test_offers_the_runs_by_name_and_sets_the_id(self, watched, values):
        (query,) = (query for query in OF_REST if query.place == "run variable run")
        texts, ids = (column_of(rows_of(query, watched, values), column) for column in query.target["columns"])
        assert [column["text"] for column in query.target["columns"]] == ["__text", "__value"]
        assert dict(zip(texts, ids, strict=True)) == {
            f"recorded/{name}": run_id for name, run_id in watched.run_ids.items()
        }
