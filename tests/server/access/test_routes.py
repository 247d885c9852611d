import pytest

from tsemon.wire import API
from tsemon_server import ui
from tsemon_server.access.table import ACCESS, Entry, find
from tsemon_server.access.tokens import SCOPES
from tsemon_server.main import create_app
from tsemon_server.settings import Settings

OPEN = [route for route, entry in ACCESS.items() if entry.scope is None]
CLOSED = [route for route, entry in ACCESS.items() if entry.scope is not None]
ELSEWHERE = {f"GET {API}/runs/{{run_id}}/spools"}  # of a service that shows a folder


def routes_of(app):
    """`GET /path` of each, also of those that OpenAPI does not describe."""
    for path, methods in app.openapi()["paths"].items():
        yield from (f"{method.upper()} {path}" for method in methods)
    for route in (*ui.router.routes, *app.routes):
        yield from (f"{method} {route.path}" for method in getattr(route, "methods", ()))


def address_of(route):
    """The route's method and an address where nothing is, below the API's prefix if it is there."""
    method, _, path = route.partition(" ")
    for name in ("run_id", "alert_id", "silence_id", "name"):
        path = path.replace(f"{{{name}}}", "none")
    return method, path.removeprefix(API) + ("?seconds=0" if path.endswith("/events") else "")


class TestTheTable:
    def test_has_every_route_of_the_service_and_no_other(self, tmp_path):
        app = create_app(Settings(database=f"sqlite:///{tmp_path / 't.db'}"), rules=())
        assert {*routes_of(app)} == {*ACCESS} - ELSEWHERE

    def test_leaves_what_it_does_not_know_to_administrators(self):
        for method, path in (
            ("GET", "/api/v2/runs"),
            ("TRACE", "/"),
            ("POST", f"{API}/runs/a/b/c"),
            ("GET", f"{API}/runs/"),
        ):
            assert find(method, path)[0] == Entry("admin", "all")

    def test_finds_what_a_path_names(self):
        assert find("GET", f"{API}/runs/a1/series") == (ACCESS[f"GET {API}/runs/{{run_id}}/series"], {"run_id": "a1"})


@pytest.mark.parametrize("route", CLOSED)
class TestARouteThatNeedsAToken:
    def test_answers_401_without_one_and_with_a_wrong_one(self, guarded, route):
        method, path = address_of(route)
        known = guarded.token("admin")
        wrong_secret = known[:-1] + ("A" if known[-1] != "A" else "B")
        for token in (None, "secret", wrong_secret, "tsm_0123456789abcdef_" + "A" * 43):
            reply = guarded.ask(method, path, token)
            assert (reply.status_code, reply.json()["error"]) == (401, "unauthorized")
            assert reply.headers["WWW-Authenticate"] == "Bearer"
            assert token is None or token not in reply.text

    def test_answers_403_to_each_scope_but_its_own(self, guarded, route):
        method, path = address_of(route)
        allowed = {ACCESS[route].scope, ACCESS[route].or_scope, "admin"}
        statuses = {scope: guarded.ask(method, path, guarded.token(scope)).status_code for scope in SCOPES}
        assert {scope for scope, status in statuses.items() if status == 403} == {*SCOPES} - allowed
        assert 401 not in statuses.values()


BY_ITSELF = {"GET /events", "POST /runs", "POST /silences", "DELETE /silences/{silence_id}", "POST /rules/test"}
"""test_tokens.py and, of events, test_events.py have a test of each."""


class TestATokenOfAnotherProject:
    @pytest.mark.parametrize("route", [route for route in CLOSED if ACCESS[route].concerns in ("run", "alert", "runs")])
    def test_sees_what_is_there_as_if_it_were_not(self, guarded, route):
        run_id = guarded.run("theirs")
        ids = {"run_id": run_id, "alert_id": guarded.alert(run_id)}
        method, _, path = route.partition(" ")
        path = path.removeprefix(API).format(**ids)
        query = f"?run={run_id}&metric=loss" if ACCESS[route].concerns == "runs" else "?metric=loss"
        token = guarded.token("ingest", "read", "admin", project="mine")
        reply = guarded.ask(method, path + query, token)
        assert (reply.status_code, reply.json()["error"][:8]) == (404, "unknown_")
        nowhere = guarded.ask(
            method, (path + query).replace(ids["run_id"], "none").replace(f"/{ids['alert_id']}", "/none"), token
        )
        assert nowhere.json()["detail"].replace("none", "ID") == reply.json()["detail"].replace(
            ids["alert_id"] if ACCESS[route].concerns == "alert" else run_id, "ID"
        )

    @pytest.mark.parametrize("route", [route for route in CLOSED if ACCESS[route].concerns in ("all", "project")])
    def test_is_refused_what_concerns_all_or_others(self, guarded, route):
        method, path = address_of(route)
        token = guarded.token("ingest", "read", "admin", project="mine")
        assert guarded.ask(method, f"{path}?project=theirs", token).status_code == 403

    def test_is_asked_for_by_routes_that_have_a_test_of_their_own(self):
        found = {route.replace(API, "") for route in CLOSED if ACCESS[route].concerns == "body"}
        assert found == BY_ITSELF


@pytest.mark.parametrize("route", [route for route in OPEN if "{" not in route and not route.startswith("DELETE")])
def test_an_open_route_asks_for_nothing(guarded, route):
    method, _, path = route.partition(" ")
    assert guarded.http.request(method, path).status_code not in (401, 403)
