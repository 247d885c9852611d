"""What the client asks and reads is what the service says it knows and answers: its OpenAPI document against ours."""

import inspect
import re
from typing import get_args

import pytest
from pydantic import BaseModel

from tsemon.wire import API, AlertState, RunState
from tsemon_client import Client, calls, models
from tsemon_server.main import create_app
from tsemon_server.settings import Settings

OWN = {"Record", "Buckets", "Connected", "RunChanged", "AlertChanged", "RunDeleted"}
"""No answers: what others are made of, and events, which hold answers."""
MODELS = {
    name: kind
    for name, kind in vars(models).items()
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not BaseModel and name not in OWN
}


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    database = f"sqlite:///{tmp_path_factory.mktemp('service')}/tsemon.db"
    return create_app(Settings(database=database)).openapi()


@pytest.fixture(scope="module")
def schemas(document):
    return document["components"]["schemas"]


def types_of(schema):
    """Each field's type, without words for people."""
    return {name: bare(field) for name, field in schema["properties"].items()}


def bare(schema):
    if isinstance(schema, list):
        return [bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: bare(part) for name, part in schema.items() if name not in ("title", "description", "default")}
    if "$ref" in kept:
        kept["$ref"] = kept["$ref"].rpartition("/")[2]
    return kept


@pytest.mark.parametrize("name", MODELS)
class TestAModel:
    def test_has_the_fields_and_types_that_the_service_says(self, name, schemas):
        """What an older service does not say may be None."""
        ours, told = types_of(MODELS[name].model_json_schema(mode="serialization")), types_of(schemas[name])
        for field, info in MODELS[name].model_fields.items():
            if not info.is_required() and ours[field] == {"anyOf": [told.get(field), {"type": "null"}]}:
                ours[field] = told[field]
        assert ours == told

    def test_needs_nothing_that_the_service_may_leave_out(self, name, schemas):
        needed = {field for field, info in MODELS[name].model_fields.items() if info.is_required()}
        assert needed <= set(schemas[name]["required"])


def test_every_answer_of_a_route_that_looks_has_a_model(schemas):
    """But those for writers, for operation, for the page's sign-in, and rows, which say what others say."""
    others = {
        "Registered",
        "Receipt",
        "Pulse",
        "Health",
        "Problem",
        "Session",
        "HTTPValidationError",
        "ValidationError",
    }
    rows = {"RunRows", "RunRow", "MetricRows", "MetricRow", "SeriesRows", "SeriesRow", "HeatmapRows", "HeatmapRow"}
    care = {"Silence", "Silences", "NotificationPage", "Notification"}
    asked = {
        "Acknowledgement", "FrameBody", "FramesBody", "Heartbeat", "JsonValue", "NewSilence", "PackedArray", "PlainArray",
        "QuantityBody", "Registration", "Row", "RuleTest", "RunChange", "SignIn",
    }  # fmt: skip
    assert set(schemas) - others - rows - care - asked <= set(MODELS)


def test_what_a_newer_service_says_further_is_left_out():
    tag = models.TagUse.model_validate({"tag": "a", "runs": 1, "colour": "red"})
    assert tag == models.TagUse(tag="a", runs=1)
    assert not hasattr(tag, "colour")


def test_records_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        models.TagUse(tag="a", runs=1).runs = 2


def test_long_lists_are_counted_where_a_record_is_printed():
    curve = models.LossLine(step=list(range(1000)), mean=[0.5])
    assert repr(curve) == "LossLine(step='<1000 values>', mean=[0.5])"


ASKED = {
    "runs": calls.runs(),
    "run": calls.run("ID"),
    "series": calls.series("ID", "m"),
    "heatmap": calls.heatmap("ID", "m"),
    "compare": calls.compare(["ID"], "m"),
    "frame": calls.frame("ID"),
    "glances": calls.glances(["ID"]),
    "tags": calls.tags(),
    "alerts": calls.alerts(),
    "alert": calls.alert("ID"),
    "acknowledge": calls.acknowledge("ID", by="ann"),
    "rules": calls.rules(),
    "rule": calls.rule("ID"),
    "standing": calls.standing("ID"),
    "test_rules": calls.test_rules("ID"),
    "export": calls.export("ID", "run.csv"),
    "events": calls.events(),
}
REQUESTS = {name: next(asked) if inspect.isgenerator(asked) else asked.request for name, asked in ASKED.items()}
NOT_OFFERED = {"events": {"seconds"}}  # a stream that ends is made anew


@pytest.mark.parametrize("name", ASKED)
class TestACall:
    """FastAPI lets pass what a route does not know: a filter with a wrong name would filter nothing."""

    @pytest.fixture
    def request_and_route(self, name, document):
        request = REQUESTS[name]
        (route,) = (path for path in document["paths"] if re.sub(r"\{\w+\}", "ID", path) == API + request.path)
        return request, document["paths"][route][request.method.lower()]

    def test_asks_for_what_its_route_knows_and_for_all_of_it(self, name, request_and_route):
        request, route = request_and_route
        known = {parameter["name"] for parameter in route.get("parameters", []) if parameter["in"] == "query"}
        assert set(request.query) == known - NOT_OFFERED.get(name, set())

    def test_knows_the_words_of_its_route(self, name, request_and_route):
        _, route = request_and_route
        words = {"state": get_args(RunState if name == "runs" else AlertState), "order": get_args(models.RunOrder)}
        words |= {"condition": get_args(models.Condition), "severity": get_args(models.Severity)}
        words |= {"along": get_args(models.Along), "kind": get_args(models.EventKind)}
        for parameter in route.get("parameters", []):
            if parameter["name"] in words:
                parts = parameter["schema"].get("anyOf", [parameter["schema"]])
                told = [part.get("items", part).get("enum", []) for part in parts]
                assert set(words[parameter["name"]]) == {word for part in told for word in part}, parameter["name"]


def test_every_call_is_among_them():
    methods = {name for name in vars(Client) if not name.startswith("_")} - {"close"}
    assert methods == {*ASKED, "find_run"}  # which asks as `runs` and `run` do
