"""What comes of the rules: alerts that open, fire and end, and what people make of the rules."""

from tsemon_server.alerts.active import ActiveRules, InForce
from tsemon_server.alerts.rulebook import Rulebook
from tsemon_server.alerts.watch import Watch

__all__ = ["ActiveRules", "InForce", "Rulebook", "Watch"]
