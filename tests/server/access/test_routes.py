import pytest

from tsemon.wire import API
from tsemon_server.access.needs import UNKNOWN, Need, need_of, needs
from tsemon_server.access.tokens import SCOPES
from tsemon_server.main import create_app
from tsemon_server.routes import NEEDS, OF_A_FOLDER, ROUTES
from tsemon_server.settings import Settings

NEED_OF = {f"{method} {route.path}": need_of(route) for route in ROUTES for method in sorted(route.methods)}
OPEN = [route for route, need in NEED_OF.items() if not need.scopes]
CLOSED = [route for route, need in NEED_OF.items() if need.scopes]


def address_of(route):
    """The route's method and an address where nothing is, below the API's prefix if it is there."""
    method, _, path = route.partition(" ")
    for name in ("run_id", "alert_id", "silence_id", "name"):
        path = path.replace(f"{{{name}}}", "none")
    return method, path.removeprefix(API) + ("?seconds=0" if path.endswith("/events") else "")


class TestWhatARouteNeeds:
    @pytest.mark.parametrize("route", [*ROUTES, *OF_A_FOLDER], ids=lambda route: f"{min(route.methods)} {route.path}")
    def test_is_declared_beside_it(self, route):
        assert isinstance(need_of(route), Need)

    def test_covers_every_route_of_a_server(self, tmp_path):
        app = create_app(Settings(database=f"sqlite:///{tmp_path / 't.db'}"), rules=())
        assert app.routes == [*ROUTES]
        app.state.parts.store.close()

    def test_is_an_administrator_if_there_is_no_such_route(self):
        for method, path in (
            ("GET", "/api/v2/runs"),
            ("TRACE", "/"),
            ("POST", f"{API}/runs/a/b/c"),
            ("GET", f"{API}/runs/"),
        ):
            assert NEEDS.find(method, path) == (UNKNOWN, {})

    def test_is_nothing_for_these_alone(self):
        """Signing in and out, what watches over the process, and the files of the web UI."""
        assert {route.replace(API, "") for route in OPEN} == {
            *(f"{method} /session" for method in ("GET", "POST", "DELETE")),
            *("GET /healthz", "GET /readyz", "GET /openapi.json", "GET /docs"),
            *(
                f"{method} {path}"
                for method in ("GET", "HEAD")
                for path in ("/", "/ui/{name:path}", "/help", "/help/{name:path}")
            ),
        }

    def test_comes_with_what_the_path_names(self):
        assert NEEDS.find("GET", f"{API}/runs/a1/series") == (Need(("read",), "run"), {"run_id": "a1"})

    def test_is_nobody_but_an_administrator_if_nothing_is_declared(self, guarded):
        """A route that is new, and whose declaration was forgotten, is shut."""

        @guarded.http.app.get(f"{API}/new")
        def new():
            return "secret"

        assert guarded.ask("GET", "/new", guarded.token("read")).status_code == 403
        assert guarded.ask("GET", "/new", guarded.token("admin")).json() == "secret"

    def test_is_an_administrator_where_something_is_changed_that_is_not_a_trainings_own(self):
        """A token of a training registers its run and sends what it measures. Whoever reads may try rules."""
        changing = {
            route: need for route, need in NEED_OF.items() if route.split()[0] in ("POST", "PUT", "PATCH", "DELETE")
        }
        others = {route for route, need in changing.items() if need.scopes not in ((), ("admin",))}
        of_a_training = {
            "POST /runs",
            "PATCH /runs/{run_id}",
            "POST /runs/{run_id}/frames",
            "POST /runs/{run_id}/heartbeat",
        }
        assert {route.replace(API, "") for route in others} == {*of_a_training, "POST /rules/test", "POST /rules/check"}
        assert sum(need.scopes == ("admin",) for need in changing.values()) >= 10

    def test_keeps_a_training_from_deleting_its_run(self, guarded):
        token = guarded.token("ingest")
        run_id = guarded.ask("POST", "/runs", token, json={"run": "gpt"}).json()["run_id"]
        assert guarded.ask("DELETE", f"/runs/{run_id}", token).status_code == 403
        assert guarded.ask("GET", f"/runs/{run_id}", token).status_code == 200

    def test_does_not_change_the_function_that_is_declared(self):
        def endpoint():
            return 1

        assert needs("read", of="run")(endpoint) is endpoint


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
        allowed = {*NEED_OF[route].scopes, "admin"}
        statuses = {scope: guarded.ask(method, path, guarded.token(scope)).status_code for scope in SCOPES}
        assert {scope for scope, status in statuses.items() if status == 403} == {*SCOPES} - allowed
        assert 401 not in statuses.values()

    def test_answers_before_it_reads_the_body(self, guarded, route):
        method, path = address_of(route)
        was_read = []

        def body():
            was_read.append(True)
            yield b"{}"

        for token, status in ((None, 401), (guarded.token(*({*SCOPES} - {*NEED_OF[route].scopes, "admin"})), 403)):
            reply = guarded.ask(method, path, token, content=body())
            assert (reply.status_code, was_read) == (status, [])


RULE_CHANGES = {"PUT /rules", "PUT /rules/{name}", "DELETE /rules/{name}", "POST /rules/{name}/restore"}
BY_ITSELF = {"GET /events", "POST /runs", "POST /silences", "DELETE /silences/{silence_id}", "POST /rules/test"}
BY_ITSELF |= RULE_CHANGES
"""test_tokens.py has a test of each; of events, test_events.py; of changes of rules, test_project_rules.py."""


class TestATokenOfAnotherProject:
    @pytest.mark.parametrize("route", [route for route in CLOSED if NEED_OF[route].of in ("run", "alert", "runs")])
    def test_sees_what_is_there_as_if_it_were_not(self, guarded, route):
        run_id = guarded.run("theirs")
        ids = {"run_id": run_id, "alert_id": guarded.alert(run_id)}
        method, _, path = route.partition(" ")
        path = path.removeprefix(API).format(**ids)
        query = f"?run={run_id}&metric=loss" if NEED_OF[route].of == "runs" else "?metric=loss"
        token = guarded.token("ingest", "read", "admin", project="mine")
        reply = guarded.ask(method, path + query, token)
        assert (reply.status_code, reply.json()["error"][:8]) == (404, "unknown_")
        nowhere = guarded.ask(
            method, (path + query).replace(ids["run_id"], "none").replace(f"/{ids['alert_id']}", "/none"), token
        )
        assert nowhere.json()["detail"].replace("none", "ID") == reply.json()["detail"].replace(
            ids["alert_id"] if NEED_OF[route].of == "alert" else run_id, "ID"
        )

    @pytest.mark.parametrize("route", [route for route in CLOSED if NEED_OF[route].of in ("all", "project")])
    def test_is_refused_what_concerns_all_or_others(self, guarded, route):
        method, path = address_of(route)
        token = guarded.token("ingest", "read", "admin", project="mine")
        assert guarded.ask(method, f"{path}?project=theirs", token).status_code == 403

    def test_is_asked_for_by_routes_that_have_a_test_of_their_own(self):
        found = {route.replace(API, "") for route in CLOSED if NEED_OF[route].of == "body"}
        assert found == BY_ITSELF


@pytest.mark.parametrize("route", [route for route in OPEN if "{" not in route and not route.startswith("DELETE")])
def test_an_open_route_asks_for_nothing(guarded, route):
    method, _, path = route.partition(" ")
    assert guarded.http.request(method, path).status_code not in (401, 403)
