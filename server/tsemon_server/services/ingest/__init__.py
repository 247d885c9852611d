"""Takes runs and frames from writers: read raw, validated in one step, committed before the reply."""

from __future__ import annotations

from tsemon_server.services.ingest.schemas import (
    FrameBody,
    FramesBody,
    Heartbeat,
    Registration,
    RunChange,
    read_frames,
    to_frame,
)
from tsemon_server.services.ingest.service import (
    Batch,
    Observe,
    accept,
    batch_of,
    heard_of,
    keep,
    key_of,
    read,
    register,
)

__all__ = [
    "Batch",
    "FrameBody",
    "FramesBody",
    "Heartbeat",
    "Observe",
    "Registration",
    "RunChange",
    "accept",
    "batch_of",
    "heard_of",
    "keep",
    "key_of",
    "read",
    "read_frames",
    "register",
    "to_frame",
]
