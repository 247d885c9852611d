"""Incidents: the alerts of an attempt that belong together, and the likeliest cause among them."""

from tsemon_server.incidents.grouping import FLAPS_WITHIN, SHOWN_AFTER, STALL, Incident, Symptom, incidents_of
from tsemon_server.incidents.order import ORDER, Order

__all__ = ["FLAPS_WITHIN", "ORDER", "SHOWN_AFTER", "STALL", "Incident", "Order", "Symptom", "incidents_of"]
