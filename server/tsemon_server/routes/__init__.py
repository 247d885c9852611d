"""The routes of the server: module-level functions, whose signatures have what they need."""

from __future__ import annotations

from fastapi.routing import APIRoute

from tsemon_server.access.needs import Needs
from tsemon_server.routes import (
    alerts,
    events,
    export,
    frames,
    operation,
    page,
    rows,
    rules,
    runs,
    series,
    session,
    spools,
)

_ROUTERS = (
    runs.writers,
    frames.router,
    rows.router,
    runs.router,
    series.router,
    export.router,
    alerts.readers,
    alerts.router,
    rules.router,
    session.router,
    events.router,
    operation.router,
    page.router,
)


def _routes_of(*routers: object) -> tuple[APIRoute, ...]:
    return tuple(route for router in routers for route in router.routes)  # type: ignore[attr-defined]


ROUTES = _routes_of(*_ROUTERS)
OF_A_FOLDER = _routes_of(spools.router)
"""Further routes of a server that shows a folder."""
NEEDS = Needs([*ROUTES, *OF_A_FOLDER])
