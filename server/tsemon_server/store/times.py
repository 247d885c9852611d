"""Times as records show them."""

from __future__ import annotations

from datetime import UTC, datetime

_LAST_DAY = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


def utc(seconds: float) -> datetime:
    """The last day that there is for what lies beyond it."""
    return datetime.fromtimestamp(min(seconds, _LAST_DAY), UTC)
