"""/metrics: the newest values of each live run, read from the database, and what the service says of itself."""

from tsemon_server.exposition.meters import Meters
from tsemon_server.exposition.page import Exposition
from tsemon_server.exposition.requests import RequestMeter
from tsemon_server.exposition.sharing import share_counters

__all__ = ["Exposition", "Meters", "RequestMeter", "share_counters"]
