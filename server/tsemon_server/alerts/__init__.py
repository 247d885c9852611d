"""What comes of the rules: alerts that open, fire and end, and what people do about them."""

from tsemon_server.alerts.active import ActiveRules, InForce
from tsemon_server.alerts.routes import BODIES, make_router
from tsemon_server.alerts.watch import Watch

__all__ = ["BODIES", "ActiveRules", "InForce", "Watch", "make_router"]
