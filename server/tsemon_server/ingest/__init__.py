"""Takes runs and frames from writers: read raw, validated in one step, committed before the reply."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from tsemon_server.ingest.routes import make_router
from tsemon_server.ingest.schemas import BODIES
from tsemon_server.ingest.service import Observe

__all__ = ["Observe", "make_router", "request_schemas"]


def request_schemas() -> dict[str, Any]:
    """The schemas of all request bodies by name, for OpenAPI."""
    _, schema = models_json_schema(
        [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
    )
    definitions: dict[str, Any] = schema["$defs"]
    return definitions
