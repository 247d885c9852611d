"""Takes runs and frames from writers: read raw, validated in one step, committed before the reply."""

from __future__ import annotations

from tsemon_server.services.ingest.routes import make_router
from tsemon_server.services.ingest.schemas import BODIES, FrameBody, to_frame
from tsemon_server.services.ingest.service import Observe

__all__ = ["BODIES", "FrameBody", "Observe", "make_router", "to_frame"]
