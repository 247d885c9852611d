import re
from typing import Annotated

import pytest
from fastapi import Depends, HTTPException, Query
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, Field
from starlette.testclient import TestClient

from tests.databases import SqliteFile
from tsemon.errors import Busy, InvalidArgument, TsemonError
from tsemon_server.main import create_app
from tsemon_server.routes.parameters import refuse_unknown_parameters
from tsemon_server.settings import Settings, settings_from_environment

from .conftest import loss_frame, problem


@pytest.fixture
def database(tmp_path):
    """What is told here does not depend on the engine."""
    return SqliteFile(tmp_path / "tsemon.db")


class TestErrors:
    def test_have_one_shape_for_routes_that_do_not_exist(self, api):
        assert problem(api.http.get("/api/v1/nope"))[:2] == (404, "not_found")
        assert problem(api.http.put("/api/v1/runs"))[:2] == (405, "method_not_allowed")

    def test_name_the_methods_that_a_path_has(self, api):
        allowed = {path: api.http.put(path).headers["Allow"] for path in ("/api/v1/runs", "/api/v1/runs/x", "/healthz")}
        assert list(allowed.values()) == ["GET, POST", "DELETE, GET, PATCH", "GET"]

    def test_that_nobody_expected_tell_the_client_nothing_of_the_code(self, api):
        @api.app.get("/breaks")
        def breaks():
            raise ZeroDivisionError("secret")

        status, error, detail = problem(api.http.get("/breaks"))
        assert (status, error) == (500, "internal_error")
        assert "secret" not in detail
        assert "Zero" not in detail

    @pytest.mark.parametrize(
        "path",
        ["/runs/none", "/alerts/99", "/rules/none", "/runs?limit=0", "/runs?order=no", "/runs/none/series?metric=x"],
    )
    def test_are_for_people_who_may_know_no_routes(self, api, path):
        detail = problem(api.http.get(f"/api/v1{path}"))[2]
        assert "/api" not in detail
        assert "query" not in detail


def all_errors(kind=TsemonError):
    for error in kind.__subclasses__():
        yield error
        yield from all_errors(error)


class TestRetryAfter:
    @pytest.mark.parametrize("error", [error for error in all_errors() if error.status in (429, 503)])
    def test_comes_with_every_error_that_says_come_again(self, api, error):
        @api.app.get("/fails")
        def fails():
            raise error("not now")

        assert problem(api.http.get("/fails"))[:2] == (error.status, error.code)

    @pytest.mark.parametrize("status", [429, 503])
    def test_comes_with_what_other_libraries_answer(self, api, status):
        @api.app.get("/fails")
        def fails():
            raise HTTPException(status)

        assert problem(api.http.get("/fails"))[0] == status

    def test_is_as_long_as_the_error_says(self, api):
        @api.app.get("/fails")
        def fails():
            raise Busy("not now", retry_after_s=6.2)

        assert api.http.get("/fails").headers["Retry-After"] == "7"


class TestUnknownParameters:
    """A misspelled filter is an error: without its filter, a request may concern far more than was meant."""

    def test_are_refused_by_every_route(self, api):
        routes = [(method, route.path) for route in iter_route_contexts(api.app.routes) for method in route.methods]
        assert len(routes) > 40
        for method, path in routes:
            reply = api.http.request(method, re.sub("{.*?}", "none", path), params={"bogus": 1})
            assert reply.status_code == 422, (method, path)
            assert method == "HEAD" or problem(reply)[2].startswith("unknown parameter 'bogus'; "), (method, path)

    def test_are_refused_by_the_route_of_a_service_that_shows_a_folder(self, tmp_path):
        app = create_app(Settings(spool=str(tmp_path)))
        with TestClient(app, base_url="http://127.0.0.1") as http:
            assert problem(http.get("/api/v1/runs/none/spools?bogus=1"))[:2] == (422, "invalid_argument")

    def test_name_the_nearest_that_there_is(self, api):
        wrong = {"form_step": "from_step", "layers": "layer", "Metric": "metric", "points[]": "points"}
        for name, right in wrong.items():
            reply = api.http.get("/api/v1/runs/none/series", params={"metric": "loss", name: 30})
            assert problem(reply) == (422, "invalid_argument", f"unknown parameter {name!r}; did you mean {right!r}?")

    def test_delete_nothing(self, api):
        run_id = api.register()
        assert api.http.delete(f"/api/v1/runs/{run_id}?dry_run=1").status_code == 422
        assert api.http.delete(f"/api/v1/runs/{run_id}").status_code == 204

    def test_are_none_of_those_that_openapi_names(self, api):
        """Wherever they are declared: in the route, in a dependency of it or in a model."""
        for path, methods in api.http.get("/openapi.json").json()["paths"].items():
            for method, route in methods.items():
                for parameter in route.get("parameters", []):
                    if parameter["in"] == "query":
                        reply = api.http.request(method, path, params={parameter["name"]: ""})
                        assert "unknown parameter" not in reply.text, (method, path, parameter["name"])

    def test_are_not_those_of_query_models_and_of_dependencies(self, api):
        class Window(BaseModel):
            from_step: int = 0
            until: int = Field(default=9, alias="to_step")

        def chosen_layer(layer: int = 0):
            return layer

        def place(layer: Annotated[int, Depends(chosen_layer)], head: int = 0):
            return layer, head

        @api.app.get("/declared", dependencies=[Depends(refuse_unknown_parameters)])
        def declared(
            window: Annotated[Window, Query()],
            place: Annotated[tuple, Depends(place)],
        ):
            return [window.from_step, window.until, *place]

        assert api.http.get("/declared?from_step=1&to_step=2&layer=3&head=4").json() == [1, 2, 3, 4]
        for name in ("until", "window", "place", "steps"):
            assert problem(api.http.get(f"/declared?{name}=1"))[0] == 422, name


class TestSafety:
    def test_headers_are_on_every_answer(self, api):
        for path in ("/api/v1/runs", "/nope", "/metrics"):
            headers = api.http.get(path).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["content-security-policy"] == "default-src 'self'; frame-ancestors 'none'"

    @pytest.mark.parametrize("page", ["/", "/docs"])
    def test_pages_run_only_scripts_of_the_service_and_none_within_themselves(self, api, page):
        reply = api.http.get(page)
        assert "default-src 'self'" in reply.headers["content-security-policy"]
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert re.findall(r"<script(?![^>]* src=\"ui/)", reply.text) == []
        assert "://" not in reply.text

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8731", "localhost:1", "LOCALHOST", "[::1]:8731"])
    def test_answers_to_its_own_names(self, api, host):
        assert api.http.get("/healthz", headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]"])
    def test_refuses_the_name_of_another_host(self, api, host):
        assert problem(api.http.get("/healthz", headers={"Host": host}))[:2] == (400, "unknown_host")

    @pytest.mark.parametrize("origin", ["http://evil.example", "https://127.0.0.1.evil.example:8731", "null", ""])
    def test_refuses_what_pages_elsewhere_send(self, api, origin):
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        reply = api.http.post("/api/v1/runs", content='{"run": "csrf"}', headers=headers)
        status, error, detail = problem(reply)
        assert (status, error) == (403, "foreign_origin")
        assert f"got {origin!r}" in detail
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert api.get("/runs")["runs"] == []

    @pytest.mark.parametrize("origin", ["http://127.0.0.1:8731", "http://localhost:1", "http://[::1]:8731"])
    def test_takes_what_its_own_pages_send(self, api, origin):
        assert api.http.post("/api/v1/runs", json={"run": "mine"}, headers={"Origin": origin}).status_code == 200

    @pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", "::", "example.org"])
    def test_asks_for_a_token_where_others_reach_it(self, tmp_path, host):
        app = create_app(Settings(host=host, database=f"sqlite:///{tmp_path}/x.db"))
        with TestClient(app, base_url="http://anything.example") as http:
            assert http.get("/api/v1/runs").status_code == 401
            assert http.get("/healthz").status_code == 200

    def test_shows_a_folder_without_tokens_and_so_on_this_machine_alone(self, tmp_path):
        with pytest.raises(InvalidArgument, match=r"shown without tokens.*--insecure"):
            create_app(Settings(host="0.0.0.0", spool=str(tmp_path)))

    def test_cannot_ask_for_tokens_and_let_anyone_in(self, tmp_path):
        with pytest.raises(InvalidArgument, match="expected --tokens or --insecure, got both"):
            create_app(Settings(tokens=True, insecure=True, database=f"sqlite:///{tmp_path}/x.db"))

    @pytest.mark.parametrize("tokens", [False, True])
    def test_answers_to_the_names_that_it_was_given(self, tmp_path, tokens):
        settings = Settings(hosts=("tsemon.example",), tokens=tokens, database=f"sqlite:///{tmp_path}/x.db")
        with TestClient(create_app(settings)) as http:
            statuses = [
                http.get("/healthz", headers={"Host": host}).status_code for host in ("tsemon.example:1", "b.example")
            ]
        assert statuses == [200, 400]

    def test_listens_anywhere_under_any_name_when_told_so(self, tmp_path):
        app = create_app(Settings(host="0.0.0.0", insecure=True, database=f"sqlite:///{tmp_path}/x.db"))
        with TestClient(app, base_url="http://anything.example") as http:
            assert http.get("/healthz", headers={"Origin": "http://other.example"}).status_code == 200


class TestHealth:
    def test_is_ok_when_the_database_answers(self, api):
        assert api.http.get("/readyz").json() == api.http.get("/healthz").json() == {"status": "ok"}

    def test_tells_process_and_database_apart(self, start):
        api = start()
        for path in api.database.path.parent.glob("tsemon.db*"):
            path.write_bytes(b"not a database" * 1000)
        assert api.http.get("/healthz").status_code == 200
        assert problem(api.http.get("/readyz"))[:2] == (503, "store_unavailable")

    @pytest.mark.parametrize("replaced", [False, True])
    def test_says_that_the_database_file_was_deleted_and_refuses_frames(self, api, replaced):
        run_id = api.register()
        api.database.path.unlink()
        if replaced:
            api.database.path.touch()
        for reply in (api.http.get("/readyz"), api.send(run_id, [loss_frame(1)])):
            status, error, detail = problem(reply)
            assert (status, error) == (503, "store_unavailable")
            assert f"{api.database.path} was deleted, moved or replaced" in detail
            assert "restart the service to begin a new one" in detail
        assert api.database.path.exists() == replaced

    def test_is_ok_again_when_the_database_file_is_put_back(self, api):
        run_id = api.register()
        aside = api.database.path.rename(api.database.path.with_name("aside.db"))
        assert api.http.get("/readyz").status_code == 503
        aside.rename(api.database.path)
        assert api.http.get("/readyz").status_code == 200
        assert api.send_ok(run_id, [loss_frame(1)])["accepted"] == 1


class TestSettings:
    def test_come_from_the_environment(self):
        found = settings_from_environment({"TSEMON_HOST": "::1", "TSEMON_PORT": "9", "TSEMON_DATABASE": "sqlite:///x"})
        assert found == Settings(host="::1", port=9, database="sqlite:///x")

    def test_have_defaults(self):
        assert settings_from_environment({}) == Settings(
            host="127.0.0.1", port=8731, database="sqlite:///tsemon.db", insecure=False
        )

    def test_know_tokens_and_names(self):
        found = settings_from_environment({"TSEMON_TOKENS": "1", "TSEMON_HOSTS": "a.example, B.example,"})
        assert (found.tokens, found.hosts) == (True, ("a.example", "b.example"))

    @pytest.mark.parametrize("wrong", [{"TSEMON_TOKENS": "yes"}, {"TSEMON_HOSTS": "http://a"}, {"TSEMON_HOSTS": "a:1"}])
    def test_refuse_tokens_and_names_that_are_none(self, wrong):
        with pytest.raises(InvalidArgument, match=r"TSEMON_TOKENS must be 1|expected a host name"):
            settings_from_environment(wrong)

    @pytest.mark.parametrize("workers", ["x", "0", "65", ""])
    def test_refuse_a_number_of_workers_that_is_none(self, workers):
        with pytest.raises(InvalidArgument, match="TSEMON_WORKERS must be a number from 1 to 64"):
            settings_from_environment({"TSEMON_WORKERS": workers})

    def test_refuse_several_processes_for_one_spool_folder(self, tmp_path):
        with pytest.raises(InvalidArgument, match="shown by one process, got workers=2"):
            create_app(Settings(spool=str(tmp_path), workers=2))

    @pytest.mark.parametrize("port", ["x", "-1", "65536", ""])
    def test_refuse_a_port_that_is_none(self, port):
        with pytest.raises(InvalidArgument, match="TSEMON_PORT must be a number from 0 to 65535"):
            settings_from_environment({"TSEMON_PORT": port})
