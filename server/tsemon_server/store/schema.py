"""Parts of all tables. All keys hold run_id, so that a cluster can shard by it; times are seconds since 1970, UTC."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Dialect, MetaData, Text, TypeDecorator

NEVER = 2**63 - 1
"""A step that no run reaches."""


class Json(TypeDecorator[Any]):
    """JSON in a text column. Not the engine's own type: the state of a rule may hold NaN, which PostgreSQL refuses."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        return json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


metadata = MetaData()
