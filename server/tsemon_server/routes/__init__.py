"""The routes of the server: module-level functions, whose signatures have what they need."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.routing import APIRoute

from tsemon_server.access.needs import Needs
from tsemon_server.routes import (
    alerts,
    events,
    export,
    frames,
    incidents,
    operation,
    page,
    rows,
    rules,
    runs,
    series,
    session,
    spools,
)


def _routes_of(*routers: APIRouter) -> tuple[APIRoute, ...]:
    return tuple(route for router in routers for route in router.routes if isinstance(route, APIRoute))


ROUTES = _routes_of(
    runs.writers,
    frames.router,
    rows.router,
    runs.router,
    series.router,
    export.router,
    alerts.readers,
    alerts.router,
    incidents.router,
    rules.router,
    session.router,
    events.router,
    operation.router,
    page.router,
)
OF_A_FOLDER = _routes_of(spools.router)
"""Further routes of a server that shows a folder."""
NEEDS = Needs([*ROUTES, *OF_A_FOLDER])
