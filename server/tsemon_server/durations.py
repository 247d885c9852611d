"""Spans of time as people write them: 12h, 30d, 2w."""

from __future__ import annotations

import re

from tsemon.errors import InvalidArgument

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
FOREVER = "forever"
LONGEST_S = 365_000 * SECONDS["d"]
"""A thousand years: what is added to a time of today is still one that can be written."""


def seconds_of(text: str) -> float | None:
    """`30d` in seconds, None for `forever`. Raises InvalidArgument."""
    if text.strip() == FOREVER:
        return None
    found = re.fullmatch(r"\s*(\d{1,6}(?:\.\d+)?)\s*([smhdw])\s*", text)
    if found is None or not float(found[1]):
        raise InvalidArgument(
            f"expected a span of time such as 12h, 30d or 2w (seconds s, minutes m, hours h, days d, weeks w), "
            f"or {FOREVER}, got {text!r}"
        )
    seconds = float(found[1]) * SECONDS[found[2]]
    if seconds > LONGEST_S:
        raise InvalidArgument(f"expected a span of time up to {written_out(LONGEST_S)}, or {FOREVER}, got {text!r}")
    return seconds


def written_out(seconds: float | None) -> str:
    """The shortest way to write it that `seconds_of` reads."""
    if seconds is None:
        return FOREVER
    unit = next((unit for unit in "wdhm" if seconds % SECONDS[unit] == 0), "s")
    return f"{seconds / SECONDS[unit]:g}{unit}"
