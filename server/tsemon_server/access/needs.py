"""What a route needs of whoever calls it: declared beside the route, read by the gate and by OpenAPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from starlette.routing import Route

from tsemon_server.access.tokens import Scope

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

Of = Literal["nothing", "run", "alert", "incident", "project", "runs", "body", "all"]
"""What a token of one project is checked against:

* `nothing`: the route tells or does the same for all projects;
* `run`, `alert`, `incident`: the path names one, which must be of the project;
* `project`: the query has `project`, which is set to the token's;
* `runs`: the query names runs, each by itself or with commas between them, which must all be of the project;
* `body`: the route checks by itself, mostly once it has read the body (`Access.check_project`);
* `all`: projects are not told apart, so a token of one project is not enough.
"""


class Need(NamedTuple):
    """What a route needs."""

    scopes: tuple[Scope, ...]
    """Any one of these is enough, and so is `admin`. Empty if no token is needed."""
    of: Of = "nothing"


UNKNOWN = Need(("admin",), "all")
"""What a request needs that matches no route, or one without a declaration."""


def needs(*scopes: Scope, of: Of = "nothing") -> Callable[[Endpoint], Endpoint]:
    """Declare that a route needs a token with one of these scopes; without any, that it needs no token."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.__needs__ = Need(scopes, of)  # type: ignore[attr-defined]
        return endpoint

    return declare


def need_of(route: Route) -> Need | None:
    """What was declared for a route; None if nothing was."""
    return getattr(route.endpoint, "__needs__", None)


class Needs:
    """What each of some routes needs."""

    def __init__(self, routes: Iterable[Route]) -> None:
        known = [(method, route, need_of(route) or UNKNOWN) for route in routes for method in route.methods or ()]
        self._exact = {(method, route.path): need for method, route, need in known if "{" not in route.path}
        self._patterns = [(method, route.path_regex, need) for method, route, need in known if "{" in route.path]

    def find(self, method: str, path: str) -> tuple[Need, Mapping[str, str]]:
        """What this request needs, and what its path names."""
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact, {}
        for known, pattern, need in self._patterns:
            found = pattern.match(path) if known == method else None
            if found is not None:
                return need, found.groupdict()
        return UNKNOWN, {}
