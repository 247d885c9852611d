"""What programs ask that watch over the server: its health, its metrics, and its interface."""

from __future__ import annotations

from fastapi import Request, Response

from tsemon_answers.operation import Health
from tsemon_server.access.needs import needs
from tsemon_server.exposition.text import content_type_for
from tsemon_server.routes.signature import TheParts, TheStore, api_router

PAGES = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}
"""What the metrics may be, for OpenAPI."""

router = api_router("operation", prefix="")


@router.get("/healthz")
@needs()
async def check_health() -> Health:
    """Whether the process is up."""
    return Health(status="ok")


@router.get("/readyz")
@needs()
def check_readiness(store: TheStore) -> Health:
    """Whether the database answers; 503 where it does not."""
    store.ping()
    return Health(status="ok")


@router.get("/metrics", response_class=Response, responses={200: {"content": PAGES}})
@needs("metrics", of="all")
def scrape_metrics(request: Request, parts: TheParts) -> Response:
    """What Prometheus scrapes, as OpenMetrics where it asks for that."""
    content_type = content_type_for(request.headers.get("accept", ""))
    return Response(parts.exposition.text(content_type), headers={"Content-Type": content_type})


@router.get("/openapi.json", include_in_schema=False)
@needs()
async def describe(request: Request) -> Response:
    """The OpenAPI document of this server."""
    return Response(request.app.document, media_type="application/json")
