"""The OpenAPI document: what FastAPI makes of the signatures, and what it cannot see there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from tsemon_server.access.gate import COOKIE
from tsemon_server.access.needs import UNKNOWN, need_of
from tsemon_server.bodies import Body, BodySchema

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

SERVERS = [{"url": "./", "description": "This server, wherever it is reached."}]
SCHEMES = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token of `tsemon token create`. One with the scope `admin` may do everything.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE,
        "description": "The same token in a browser that has signed in with `POST /session`.",
    },
}


def takes(body: type[Body]) -> Callable[[Endpoint], Endpoint]:
    """Declare the body of a route that reads it raw."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.__takes__ = body  # type: ignore[attr-defined]
        return endpoint

    return declare


def body_of(route: APIRoute) -> type[Body] | None:
    """The body that was declared for a route; None if nothing was."""
    return getattr(route.endpoint, "__takes__", None)


def describe(document: dict[str, Any], routes: Iterable[BaseRoute], needs_tokens: bool) -> dict[str, Any]:
    """Complete the `document` that FastAPI made of these routes."""
    document["servers"] = SERVERS
    document["components"]["securitySchemes"] = SCHEMES
    bodies: dict[str, type[Body]] = {}
    for route in routes:
        if not isinstance(route, APIRoute) or not route.include_in_schema:
            continue
        body = body_of(route)
        for method in route.methods or ():
            operation = document["paths"][route.path][method.lower()]
            operation["security"] = _security(route, needs_tokens)
            operation["parameters"] = [_without_null(one) for one in operation.get("parameters", [])]
            if body is not None:
                bodies[body.__name__] = body
                schema = {"$ref": f"#/components/schemas/{body.__name__}"}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    template = "#/components/schemas/{model}"
    _, schema = models_json_schema(
        [(body, "validation") for body in bodies.values()], ref_template=template, schema_generator=BodySchema
    )
    document["components"]["schemas"] |= schema["$defs"]
    return document


def _security(route: APIRoute, needs_tokens: bool) -> list[dict[str, list[str]]]:
    """Any one of these is enough. A server that needs no tokens ignores those that come."""
    scopes = (need_of(route) or UNKNOWN).scopes
    ways: list[dict[str, list[str]]] = [{scheme: [scope]} for scope in scopes for scheme in SCHEMES]
    return ways if needs_tokens or not scopes else [{}, *ways]


def _without_null(parameter: dict[str, Any]) -> dict[str, Any]:
    """A parameter of a query string can be left out, but has no null."""
    schema = parameter["schema"]
    if "anyOf" in schema:
        kinds = [kind for kind in schema.pop("anyOf") if kind != {"type": "null"}]
        schema |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return parameter
