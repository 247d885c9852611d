"""What the client asks and reads is defined once, in `tsemon_answers`, for the server too."""

import inspect
import re
from datetime import UTC, datetime
from typing import get_args

import pytest
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel

from tsemon.wire import API
from tsemon_answers.record import Query
from tsemon_client import Client, calls, models
from tsemon_server.main import create_app
from tsemon_server.settings import Settings

RUN = {
    "run_id": "1", "project": "p", "run": "r", "state": "running", "attempt": 1, "num_blocks": 2, "tags": [],
    "created_at": "2026-01-31T12:00:00Z", "updated_at": "2026-01-31T12:00:00Z", "last_step": None, "num_frames": 0,
    "loss": None, "process_step": None, "stepped_at": None, "open_alerts": 0, "alerts_at_end": 0,
}  # fmt: skip
"""As a server sent it before there were conditions."""


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return create_app(Settings(database=f"sqlite:///{tmp_path_factory.mktemp('service')}/tsemon.db"))


@pytest.fixture(scope="module")
def document(app):
    return app.openapi()


class TestTheServer:
    def test_responds_with_records_of_the_one_definition_only(self, app):
        models = {
            route.path: route.response_model for route in iter_route_contexts(app.routes) if route.include_in_schema
        }
        answers = {
            path: model for path, model in models.items() if inspect.isclass(model) and model.__name__ != "Response"
        }
        assert len(answers) > 20
        for path, model in answers.items():
            if issubclass(model, BaseModel):
                assert model.__module__.startswith("tsemon_answers."), path

    def test_reads_queries_of_the_one_definition_only(self, app):
        asked = set()
        for route in iter_route_contexts(app.routes):
            for parameter in inspect.signature(route.endpoint, eval_str=True).parameters.values():
                kinds = get_args(parameter.annotation)[:1]
                asked |= {kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)}
        assert len(asked) > 12
        assert all(issubclass(kind, Query) and kind.__module__.startswith("tsemon_answers.") for kind in asked)

    def test_always_sends_what_only_an_older_one_leaves_out(self, document):
        run = document["components"]["schemas"]["Run"]
        assert "condition" in run["required"]
        assert run["properties"]["condition"]["enum"] == ["running", "silent", "stuck", "finished", "failed"]
        assert "default" not in run["properties"]["condition"]


class TestARecord:
    def test_lacks_what_an_older_server_does_not_send(self):
        run = models.Run.model_validate(RUN)
        assert (run.condition, run.run) == (None, "r")
        page = models.RunPage.model_validate({"runs": [RUN], "next_cursor": None})
        assert (page.runs, page.total) == ([run], None)

    def test_leaves_out_what_a_newer_server_adds(self):
        tag = models.TagUse.model_validate({"tag": "a", "runs": 1, "colour": "red"})
        assert tag == models.TagUse(tag="a", runs=1)
        assert not hasattr(tag, "colour")

    def test_does_not_change(self):
        with pytest.raises(ValueError, match="frozen"):
            models.TagUse(tag="a", runs=1).runs = 2

    def test_counts_long_lists_when_it_is_printed(self):
        curve = models.LossLine(step=list(range(1000)), mean=[0.5])
        assert repr(curve) == "LossLine(step='<1000 values>', mean=[0.5])"


CLIENT = Client("http://127.0.0.1:9")


class TestACall:
    """Every question that the client can ask is one that the server answers."""

    @pytest.fixture
    def asked(self, monkeypatch):
        """Questions in place of their answers."""
        monkeypatch.setattr(Client, "_talk", lambda _, talk: next(talk))
        monkeypatch.setattr(Client, "_list", lambda _, listing: listing.request)
        monkeypatch.setattr(Client, "_save", lambda _, download: download.request)
        monkeypatch.setattr(Client, "_hear", lambda _, request: request)
        return CLIENT

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("runs", {"tags": ["a"], "q": "b", "order": "loss"}),
            ("find_run", {"name": "a"}),
            ("run", {"run_id": "ID"}),
            (
                "series",
                {"run_id": "ID", "metric": "m", "layer": 1, "head": 2, "from_step": 3, "to_step": 4, "points": 5},
            ),
            ("heatmap", {"run_id": "ID", "metric": "m", "columns": 5, "attempt": 1, "extremes": True}),
            ("compare", {"run_ids": ["ID"], "metric": "m", "along": "time"}),
            ("frame", {"run_id": "ID", "step": 3}),
            ("glances", {"run_ids": ["ID"], "points": 9}),
            ("tags", {"project": "p"}),
            ("alerts", {"state": "firing", "run_id": "ID", "since": "2026-01-31T12:00:00Z", "at_end": True}),
            ("alert", {"alert_id": "ID"}),
            ("acknowledge", {"alert_id": "ID", "by": "ann"}),
            ("silences", {"project": "p"}),
            ("silence", {"until": datetime(2100, 1, 1, tzinfo=UTC), "by": "ann"}),
            ("end_silence", {"silence_id": "ID"}),
            (
                "incidents",
                {"state": "open", "run_id": "ID", "attempt": 1, "family": "tse", "since": "2026-01-31T12:00:00Z"},
            ),
            ("incident", {"incident_id": "ID"}),
            ("rules", {}),
            ("rule", {"name": "ID"}),
            ("put_rules", {"rules": "rules: []", "project": "p"}),
            ("disable_rule", {"name": "ID", "project": "p"}),
            ("restore_rule", {"name": "ID", "project": "p"}),
            ("standing", {"run_id": "ID"}),
            ("check_rule", {"definition": {"name": "mine", "when": "loss > 1"}}),
            ("test_rules", {"run_id": "ID"}),
            ("export", {"run_id": "ID", "path": "run.csv", "metrics": ["m"]}),
            ("sub_step", {"run_id": "ID", "step": 20, "attempt": 1, "healthy_step": 3}),
            ("zoom", {"run_id": "ID"}),
            ("events", {"kinds": ["run"]}),
        ],
    )
    def test_is_a_route_with_these_parameters(self, name, arguments, asked, document):
        request = getattr(asked, name)(**arguments)
        (path,) = (path for path in document["paths"] if re.sub(r"\{\w+\}", "ID", path) == API + request.path)
        route = document["paths"][path][request.method.lower()]
        known = {parameter["name"] for parameter in route.get("parameters", []) if parameter["in"] == "query"}
        assert set(request.params) <= known
        elsewhere = {
            "run_id",
            "alert_id",
            "incident_id",
            "silence_id",
            "until",
            "path",
            "name",
            "by",
            "definition",
            "rules",
        }
        assert len(request.params) >= len(arguments.keys() - elsewhere)

    def test_is_among_these(self):
        tested = {name for name, _ in TestACall.test_is_a_route_with_these_parameters.pytestmark[0].args[1]}
        assert tested == {name for name in vars(calls.Calls) if not name.startswith("_")}

    def test_sends_only_what_was_given(self, asked):
        assert asked.series("ID", "loss", layer=None).params == {"metric": "loss"}
        assert asked.alerts(state="firing").params == {"state": ["firing"], "limit": 200}
        assert asked.runs(tags=["a", "b"], limit=3).params == {"tag": ["a", "b"], "limit": 3}
