"""Times as records show them."""

from __future__ import annotations

from datetime import UTC, datetime

_LAST = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


def utc(seconds: float) -> datetime:
    """The last second that there is for what lies beyond it."""
    return datetime.fromtimestamp(min(seconds, _LAST), UTC)
