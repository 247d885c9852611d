"""Times as records show them."""

from __future__ import annotations

from datetime import UTC, datetime


def utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
