"""Takes runs and frames from writers: read raw, validated in one step, committed before the reply."""

from __future__ import annotations

from tsemon_server.ingest.routes import make_router
from tsemon_server.ingest.schemas import BODIES
from tsemon_server.ingest.service import Observe

__all__ = ["BODIES", "Observe", "make_router"]
