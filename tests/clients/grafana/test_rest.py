"""Every question to the service, asked of a real one that holds recorded runs, and read as Infinity reads."""

from __future__ import annotations

import datetime

import pytest

from tests.clients.grafana.dashboards import filled, queries

OF_REST = [query for query in queries() if not query.is_of_prometheus]


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
class TestEachQuery:
    def test_gets_rows(self, query, watched, values):
        assert rows_of(query, watched, values)

    def test_finds_each_column_and_values_of_its_kind(self, query, watched, values):
        rows = rows_of(query, watched, values)
        for column in query.target["columns"]:
            found = [value for value in column_of(rows, column) if value is not None]
            assert all(map(KINDS[column["type"]], found)), column
            # An alert that still fires is not over at any step; all else is there.
            assert found or column["selector"] == "resolved_step", f"nothing but null in {column}"

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
