"""What the server says of its interface, and a client that is generated from that."""

import importlib
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.serving import serving
from tsemon_server.access.gate import COOKIE
from tsemon_server.access.needs import need_of
from tsemon_server.access.tokens import new_token
from tsemon_server.errors import PROBLEMS
from tsemon_server.main import create_app
from tsemon_server.routes import ROUTES
from tsemon_server.settings import Settings

HIGH_LOSS = b"""
rules:
  - {name: high-loss, family: loss, severity: warning, title: The loss is high, when: {value: [{scalar: loss}], above: 10},
     for: {samples: 1, steps: 0}, advice: lower it, source: the tests, origin: convention}
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server that needs tokens."""
    app = create_app(Settings(database=f"sqlite:///{tmp_path_factory.mktemp('openapi')}/t.db", tokens=True), rules=())
    yield app
    app.state.parts.store.close()


@pytest.fixture(scope="module")
def document(guarded):
    return json.loads(guarded.document)


def operations(document):
    """(method, path, operation) of each."""
    return [(method, path, one) for path, methods in document["paths"].items() for method, one in methods.items()]


class TestOpenApi:
    def test_describes_every_field_of_every_schema(self, document):
        schemas = document["components"]["schemas"]
        bare = [
            f"{name}.{field}"
            for name, schema in schemas.items()
            for field, about in schema.get("properties", {}).items()
            if not about.get("description")
        ]
        assert len(schemas) > 10
        assert bare == []

    def test_describes_every_route_and_parameter(self, document):
        for path, methods in document["paths"].items():
            for method, route in methods.items():
                assert route.get("description"), (method, path)
                assert all(parameter.get("description") for parameter in route.get("parameters", [])), (method, path)

    def test_has_the_bodies_that_are_read_raw(self, document):
        body = document["paths"]["/api/v1/runs/{run_id}/frames"]["post"]["requestBody"]
        assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/FramesBody"}
        assert set(document["components"]["schemas"]["FrameBody"]["required"]) == {"seq", "step", "time"}

    def test_points_only_to_what_is_there(self, document):
        pointed = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
        assert pointed <= set(document["components"]["schemas"])

    def test_says_how_errors_look_on_every_api_route(self, document):
        for path, methods in document["paths"].items():
            if path.startswith("/api/"):
                for route in methods.values():
                    problems = {status: told for status, told in route["responses"].items() if status >= "400"}
                    assert problems.keys() == {str(status) for status in PROBLEMS}
                    for told in problems.values():
                        shown = told["content"]["application/json"]["schema"]
                        assert shown == {"$ref": "#/components/schemas/Problem"}

    def test_says_where_the_server_is_wherever_a_proxy_puts_it(self, document):
        assert [server["url"] for server in document["servers"]] == ["./"]

    def test_calls_each_operation_by_a_name_of_its_own(self, document):
        names = [operation["operationId"] for _, _, operation in operations(document)]
        assert len({*names}) == len(names) > 40
        assert [name for name in names if not re.fullmatch(r"[a-z]+(_[a-z]+)+", name)] == []
        assert {"list_runs", "read_series", "send_frames", "acknowledge_alert"} <= {*names}

    def test_says_which_scope_lets_somebody_in_and_how_a_token_is_sent(self, document):
        schemes = document["components"]["securitySchemes"]
        assert (schemes["token"]["scheme"], schemes["session"]["name"]) == ("bearer", COOKIE)
        told = {(method, path): operation["security"] for method, path, operation in operations(document)}
        for route in ROUTES:
            for method in route.methods if route.include_in_schema else ():
                asked = told[method.lower(), route.path]
                assert [next(iter(way.values())) for way in asked if "token" in way] == [
                    [scope] for scope in need_of(route).scopes
                ]
                assert {next(iter(way)) for way in asked} == ({"token", "session"} if need_of(route).scopes else set())

    def test_says_that_anyone_is_let_in_without_a_token_if_that_is_so(self, tmp_path):
        app = create_app(Settings(database=f"sqlite:///{tmp_path}/t.db"), rules=())
        assert app.openapi()["paths"]["/api/v1/runs"]["get"]["security"][0] == {}
        app.state.parts.store.close()

    def test_has_no_null_for_parameters_which_a_query_string_cannot_send(self, document):
        assert '{"type": "null"}' not in json.dumps(
            [operation["parameters"] for _, _, operation in operations(document)]
        )


@pytest.fixture(scope="module")
def generated(document, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_text(json.dumps(document))
    (folder / "config.yml").write_text(
        "post_hooks: []\ncontent_type_overrides: {application/yaml: application/octet-stream}\n"
    )
    command = [
        sys.executable,
        "-m",
        "openapi_python_client",
        "generate",
        "--path",
        "openapi.json",
        "--meta",
        "none",
    ]
    command += ["--config", "config.yml", "--output-path", "tsemon_generated", "--fail-on-warning"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    yield folder / "tsemon_generated"
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def api(generated):
    """Each operation by its name."""
    found = {
        path.stem: importlib.import_module(f"tsemon_generated.api.{path.parent.name}.{path.stem}")
        for path in generated.glob("api/*/[a-z]*.py")
    }
    return SimpleNamespace(**found)


@pytest.fixture(scope="module")
def models(generated):
    return importlib.import_module("tsemon_generated.models")


@pytest.fixture(scope="module")
def client(generated, guarded):
    made = new_token()
    guarded.state.parts.store.tokens.add(
        made.token_id, name="t", digest=made.digest, scopes=("admin",), project=None, expires_at=None
    )
    with serving(guarded) as url:
        client = importlib.import_module("tsemon_generated.client")
        with client.AuthenticatedClient(url, made.text, raise_on_unexpected_status=True) as client:
            yield client


class TestAGeneratedClient:
    """openapi-python-client makes it of the document alone; here it asks a real server."""

    def test_has_every_operation(self, document, api):
        assert {*vars(api)} == {operation["operationId"] for _, _, operation in operations(document)}

    def test_does_all_that_can_be_done(self, api, models, client, tmp_path):
        asked = []

        def ask(name, *path, **arguments):
            """What the server answers, as the document says that it is, or its text if that is no JSON."""
            asked.append(name)
            reply = getattr(api, name).sync_detailed(*path, client=client, **arguments)
            assert reply.status_code in (200, 204), (name, reply.content)
            return reply.content if reply.parsed is None else reply.parsed

        file = importlib.import_module("tsemon_generated.types").File
        rules = file(payload=HIGH_LOSS, mime_type="application/yaml")
        assert [rule.name for rule in ask("put_rules", body=rules).rules] == ["high-loss"]
        registration = models.Registration(run="gpt", blocks=["h.0", "h.1"], tags=["a"])
        run_id = ask("register_run", body=registration).run_id
        frames = models.FramesBody.from_dict(
            {
                "writer": "w",
                "attempt": 1,
                "frames": [
                    {"seq": i, "step": 10 * i, "time": 1.0, "scalars": {"loss": 5.0 * i}, "layers": {"m": [0.5, i]}}
                    for i in range(4)
                ],
            }
        )
        receipt = ask("send_frames", run_id, body=frames)
        assert (receipt.accepted, [alert.rule for alert in receipt.alerts]) == (4, ["high-loss"])
        heartbeat = models.Heartbeat(writer="w", attempt=1, step=40)
        assert len(ask("send_heartbeat", run_id, body=heartbeat).alerts) == 1
        assert [run.run for run in ask("list_runs", tag=["a"]).runs] == ["gpt"]
        assert ask("describe_run", run_id).process_step == 40
        assert ask("change_run", run_id, body=models.RunChange(tags=["b"])).tags == ["b"]
        assert [tag.tag for tag in ask("list_tags").tags] == ["b"]
        assert ask("list_glances", run=[run_id]).glances[0].loss.mean == [0.0, 5.0, 10.0, 15.0]
        assert ask("read_series", run_id, metric="loss", from_step=10).step == [10, 20, 30]
        assert ask("read_heatmap", run_id, metric="m").layers == 2
        assert ask("compare_runs", run=[run_id], metric="m", layer=-1).runs[0].max_ == [0.0, 1.0, 2.0, 3.0]
        assert ask("read_frame", run_id).step == 30
        assert ask("export_run", run_id, metric=["loss"]).count("\n") == 1 + 4
        assert [row.label for row in ask("list_run_rows").rows] == ["default/gpt"]
        kind = models.ListMetricRowsKind.SCALARS
        assert [row.metric for row in ask("list_metric_rows", run=[run_id], kind=kind).rows] == ["loss"]
        assert len(ask("read_series_rows", run=[run_id], metric="loss", from_step="").rows) == 4
        assert len(ask("read_heatmap_rows", run=run_id, metric="m").rows) == 8
        (alert,) = ask("list_alerts", run=run_id, state=[models.ListAlertsStateItem.FIRING]).alerts
        (incident,) = ask("list_incidents", run=run_id, state=models.ListIncidentsState.OPEN).incidents
        assert (incident.incident_id, incident.rule) == (alert.incident_id, "high-loss")
        assert [one.incident_id for one in ask("list_incidents_of_run", run_id).incidents] == [incident.incident_id]
        assert ask("describe_incident", incident.incident_id).cause_id == alert.alert_id
        assert ask("find_sub_step", run_id, step=20).sub_step is None
        assert ask("zoom_in", run_id).attempt == 1
        seen = models.Acknowledgement(by="ann")
        assert ask("acknowledge_alert", alert.alert_id, body=seen).state.value == "acknowledged"
        assert ask("unacknowledge_alert", alert.alert_id).state.value == "firing"
        assert ask("resolve_alert", alert.alert_id, body=seen).resolved_reason.value == "by hand"
        assert ask("describe_alert", alert.alert_id).state.value == "resolved"
        assert ask("list_notifications").notifications == []
        silence = {"rule": "high-loss", "until": "2999-01-01T00:00:00Z", "created_by": "ann"}
        made = ask("add_silence", body=models.NewSilence.from_dict(silence))
        assert [one.silence_id for one in ask("list_silences").silences] == [made.silence_id]
        ask("remove_silence", made.silence_id)
        assert list(ask("list_rules").explained.additional_properties) == ["high-loss"]
        assert len(ask("describe_rule", "high-loss").versions) == 1
        assert len(ask("put_rule", "high-loss", body=rules).versions) == 1
        assert ask("list_rule_standings", run_id).rules[0].rule == "high-loss"
        assert ask("check_rule", body=rules).mistakes == []
        assert ask("test_rules", body=models.RuleTest(run_id=run_id)).num_frames == 4
        assert len(ask("disable_rule", "high-loss").versions) == 2
        assert ask("sign_in", body=models.SignIn(token=client.token)).needs_token
        assert ask("describe_session").scopes == ["admin"]
        ask("sign_out")
        assert ask("check_health").status == ask("check_readiness").status == "ok"
        assert "tsemon_run_info" in ask("scrape_metrics")
        assert ask("stream_events", seconds=0).startswith(b"retry:")
        ask("delete_run", run_id)
        assert {*vars(api)} - {*asked} == {"restore_rule"}, "there is no built-in rule here"

    def test_reads_what_the_server_refuses(self, api, models, client):
        refused = api.describe_run.sync("none", client=client)
        assert (refused.error, isinstance(refused, models.Problem)) == ("unknown_run", True)
        refused = api.restore_rule.sync("none", client=client)
        assert refused.error == "unknown_rule"
