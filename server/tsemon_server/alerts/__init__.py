"""What comes of the rules: alerts that open, fire and end, and what people do about them."""

from fastapi import APIRouter

from tsemon_server.alerts import care, editing
from tsemon_server.alerts.active import ActiveRules, InForce
from tsemon_server.alerts.rulebook import Rulebook
from tsemon_server.alerts.watch import Watch
from tsemon_server.store import Store

__all__ = ["BODIES", "ActiveRules", "InForce", "Rulebook", "Watch", "make_router"]

BODIES = (*care.BODIES, *editing.BODIES)
"""Of all requests."""


def make_router(store: Store, rulebook: Rulebook, active: ActiveRules) -> APIRouter:
    """Routes by which people see to alerts, and edit and try rules."""
    router = APIRouter()
    router.include_router(care.make_router(store))
    router.include_router(editing.make_router(store, rulebook, active))
    return router
