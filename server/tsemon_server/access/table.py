"""Who may call which route: all of them, in one place. What is not here, only an administrator may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from starlette.routing import compile_path

from tsemon.wire import API
from tsemon_server.access.tokens import Scope

Concerns = Literal["nothing", "run", "alert", "project", "runs", "body", "all"]
"""What a token of one project is held against:

* `nothing`: what the route tells or does is the same for all projects;
* `run`, `alert`: the path names one, which must be of the project;
* `project`: the query has `project`, which is set to the token's;
* `runs`: the query names runs, each by itself or with commas between, which must all be of the project;
* `body`: the route asks by itself, mostly once it has read the body (`Access.check_project`);
* `all`: projects are not told apart, so a token of one project is not enough.
"""


class Entry(NamedTuple):
    """What a route asks of whoever calls it."""

    scope: Scope | None
    """None where no token is needed."""
    concerns: Concerns
    or_scope: Scope | None = None
    """Another one that will do."""


ACCESS: Mapping[str, Entry] = {
    "GET /": Entry(None, "nothing"),
    "HEAD /": Entry(None, "nothing"),
    "GET /ui/{name:path}": Entry(None, "nothing"),
    "HEAD /ui/{name:path}": Entry(None, "nothing"),
    "GET /docs": Entry(None, "nothing"),
    "GET /openapi.json": Entry(None, "nothing"),
    "GET /healthz": Entry(None, "nothing"),
    "GET /readyz": Entry(None, "nothing"),
    "GET /metrics": Entry("metrics", "all"),
    f"GET {API}/session": Entry(None, "nothing"),
    f"POST {API}/session": Entry(None, "nothing"),
    f"DELETE {API}/session": Entry(None, "nothing"),
    f"POST {API}/runs": Entry("ingest", "body"),
    f"PATCH {API}/runs/{{run_id}}": Entry("ingest", "run"),
    f"POST {API}/runs/{{run_id}}/frames": Entry("ingest", "run"),
    f"POST {API}/runs/{{run_id}}/heartbeat": Entry("ingest", "run"),
    f"DELETE {API}/runs/{{run_id}}": Entry("admin", "run"),
    # A writer asks whether a run of its name has frames, and whether its attempt is over.
    f"GET {API}/runs": Entry("read", "project", or_scope="ingest"),
    f"GET {API}/runs/{{run_id}}": Entry("read", "run", or_scope="ingest"),
    f"GET {API}/runs/{{run_id}}/series": Entry("read", "run"),
    f"GET {API}/runs/{{run_id}}/heatmap": Entry("read", "run"),
    f"GET {API}/runs/{{run_id}}/frame": Entry("read", "run"),
    f"GET {API}/runs/{{run_id}}/export": Entry("read", "run"),
    f"GET {API}/runs/{{run_id}}/rules": Entry("read", "run"),
    f"GET {API}/runs/{{run_id}}/spools": Entry("read", "run"),
    f"GET {API}/events": Entry("read", "body"),
    f"GET {API}/tags": Entry("read", "project"),
    f"GET {API}/glances": Entry("read", "runs"),
    f"GET {API}/compare": Entry("read", "runs"),
    f"GET {API}/rows/runs": Entry("read", "project"),
    f"GET {API}/rows/metrics": Entry("read", "runs"),
    f"GET {API}/rows/series": Entry("read", "runs"),
    f"GET {API}/rows/heatmap": Entry("read", "runs"),
    f"GET {API}/alerts": Entry("read", "project"),
    f"GET {API}/alerts/{{alert_id}}": Entry("read", "alert"),
    f"POST {API}/alerts/{{alert_id}}/ack": Entry("admin", "alert"),
    f"DELETE {API}/alerts/{{alert_id}}/ack": Entry("admin", "alert"),
    f"POST {API}/alerts/{{alert_id}}/resolve": Entry("admin", "alert"),
    f"GET {API}/notifications": Entry("read", "all"),
    f"GET {API}/silences": Entry("read", "project"),
    f"POST {API}/silences": Entry("admin", "body"),
    f"DELETE {API}/silences/{{silence_id}}": Entry("admin", "body"),
    f"GET {API}/rules": Entry("read", "nothing"),
    f"GET {API}/rules/{{name}}": Entry("read", "nothing"),
    f"POST {API}/rules/test": Entry("read", "body"),
    f"PUT {API}/rules": Entry("admin", "all"),
    f"PUT {API}/rules/{{name}}": Entry("admin", "all"),
    f"DELETE {API}/rules/{{name}}": Entry("admin", "all"),
    f"POST {API}/rules/{{name}}/restore": Entry("admin", "all"),
}
"""By method and path."""

UNKNOWN = Entry("admin", "all")
_EXACT = {route: entry for route, entry in ACCESS.items() if "{" not in route}
_PATTERNS = [
    (route.partition(" ")[0], compile_path(route.partition(" ")[2])[0], entry)
    for route, entry in ACCESS.items()
    if "{" in route
]


def describe(document: dict[str, Any]) -> None:
    """Let an OpenAPI document say which scope each of its routes asks for."""
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, routes in document["paths"].items():
        for method, route in routes.items():
            scope = find(method.upper(), path)[0].scope
            route["security"] = [] if scope is None else [{"token": [scope]}]


def find(method: str, path: str) -> tuple[Entry, Mapping[str, str]]:
    """What is asked of this request, and what its path names."""
    exact = _EXACT.get(f"{method} {path}")
    if exact is not None:
        return exact, {}
    for known, pattern, entry in _PATTERNS:
        found = pattern.match(path) if known == method else None
        if found is not None:
            return entry, found.groupdict()
    return UNKNOWN, {}
