"""What the signatures of routes are made of: routers, path parameters, queries, and the parts of the server."""

from __future__ import annotations

import threading
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel

from tsemon.wire import API
from tsemon_server.access.keeper import Keeper
from tsemon_server.alerts import ActiveRules, Rulebook
from tsemon_server.errors import PROBLEMS
from tsemon_server.parts import Parts
from tsemon_server.routes.parameters import refuse_unknown_parameters
from tsemon_server.services.queries.glances import Kept
from tsemon_server.store import Store

Q = TypeVar("Q", bound=BaseModel)

Asked = Annotated[Q, Query()]
"""A query of `tsemon_answers`, read from the query string."""
MAX_RUN_ID = 64
"""Characters."""
RunId = Annotated[str, Path(description="Id of the run, as the registration answered it.", max_length=MAX_RUN_ID)]
AlertId = Annotated[str, Path(description="Id of the alert, as GET /alerts answered it.", max_length=64)]
IncidentId = Annotated[str, Path(description="Id of the incident, as GET /incidents answered it.", max_length=64)]
SilenceId = Annotated[str, Path(description="Id of the silence, as GET /silences answered it.", max_length=64)]
RuleName = Annotated[str, Path(description="Name of the rule.", max_length=128)]


def api_router(tag: str, prefix: str = API) -> APIRouter:
    """A router for routes of one kind. The name of its function is how a route is called in OpenAPI."""
    return APIRouter(
        prefix=prefix,
        tags=[tag],
        responses=PROBLEMS,
        dependencies=[Depends(refuse_unknown_parameters)],
        generate_unique_id_function=lambda route: route.name,
    )


async def _parts(request: Request) -> Parts:  # async, because FastAPI calls other functions on a thread
    parts: Parts = request.app.state.parts
    return parts


def _part(name: str) -> Any:
    async def part(request: Request) -> Any:
        return getattr(request.app.state.parts, name)

    return Depends(part)


TheParts = Annotated[Parts, Depends(_parts)]
TheStore = Annotated[Store, _part("store")]
TheKeeper = Annotated[Keeper | None, _part("keeper")]
TheRulebook = Annotated[Rulebook, _part("rulebook")]
TheActiveRules = Annotated[ActiveRules, _part("active")]
TheGlances = Annotated[Kept, _part("glances")]
TheLargeCharts = Annotated[threading.Semaphore, _part("large_charts")]


def as_json(found: BaseModel) -> Response:
    """The response, without the checks that FastAPI would make of it once more."""
    return Response(found.model_dump_json(), media_type="application/json")
