"""Curves made of characters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = ".:-=+*#@"
NO_VALUE = " "
NOT_FINITE = "x"

# Bits of a braille character: which of its dots, by column and row.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
BRAILLE = 0x2800

Values = Sequence[float | None]


def is_ascii(console: Console | None) -> bool:
    """Whether the encoding of the terminal, or of the pipe, has no more."""
    if console is not None:
        return console.options.ascii_only
    return not (sys.stdout.encoding or "").lower().startswith("utf")


def bars_for(console: Console | None) -> str:
    """Those that its encoding has."""
    return ASCII_BARS if is_ascii(console) else BARS


def sparkline(
    values: Values, *, low: float | None = None, high: float | None = None, bars: str = BARS, gap: str = NO_VALUE
) -> str:
    """A character for each value, `gap` where there is none; between `low` and `high`, or the values' own."""
    known = [value for value in values if value is not None]
    low = min(known, default=0.0) if low is None else low
    high = max(known, default=0.0) if high is None else high
    return "".join(gap if value is None else _bar(value, low, high, bars) for value in values)


def _bar(value: float, low: float, high: float, bars: str) -> str:
    share = (value - low) / (high - low) if high > low else 0.0
    return bars[min(max(int(share * len(bars)), 0), len(bars) - 1)]


def fitted(values: Values, width: int) -> list[float | None]:
    """The newest at the right end: at most `width` values, each the mean of those it stands for."""
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [mean(values[start:end]) for start, end in pairwise(edges)]


def mean(values: Values) -> float | None:
    """Of those that are there."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def plot(
    step: Sequence[int], low: Values, middle: Values, high: Values, *, width: int, height: int, in_ascii: bool = False
) -> list[str]:
    """Lines of braille, or of stars, the highest value first: `middle` as a curve, and from `low` to `high` a bar behind it.

    What a bucket saw in one step alone stays visible, since its bar reaches there.
    """
    finite = [value for values in (low, middle, high) for value in values if value is not None]
    if not finite:
        return []
    bottom, top = min(finite), max(finite)
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]

    def row_of(value: float) -> int:
        share = (value - bottom) / (top - bottom) if top > bottom else 0.5
        return rows - 1 - round(share * (rows - 1))

    span = max(step[-1] - step[0], 1)
    before: tuple[int, int] | None = None
    for at, least, mean_value, most in zip(step, low, middle, high, strict=True):
        if least is None or mean_value is None or most is None:
            before = None
            continue
        x = round((at - step[0]) / span * (columns - 1))
        y = row_of(mean_value)
        marked = {(x, filled) for filled in range(row_of(most), row_of(least) + 1)}
        marked |= set(_line(before, (x, y)) if before else [(x, y)])
        for dot_x, dot_y in marked:
            cells[dot_y // 4][dot_x // 2] |= DOTS[dot_x % 2][dot_y % 4]
        before = (x, y)
    if in_ascii:
        return ["".join("*" if dots else " " for dots in line).rstrip() for line in cells]
    return ["".join(chr(BRAILLE + dots) for dots in line).rstrip(chr(BRAILLE)) for line in cells]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots from one to the other."""
    (x0, y0), (x1, y1) = start, end
    num = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * i / num), round(y0 + (y1 - y0) * i / num)) for i in range(num + 1)]


def layer_groups(num_layers: int, num_groups: int) -> list[range]:
    """Neighbouring layers in groups of about the same size."""
    num_groups = min(num_groups, num_layers)
    edges = [round(i * num_layers / num_groups) for i in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(edges)]
