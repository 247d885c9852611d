"""From seconds to a table and a picture."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

OURS = ("unsampled", "sampled", "sampled, slow tier too", "amortised")
"""Rows that are tsemon's; they have a colour of their own."""


@dataclass
class Spent:
    """Seconds of a step, on the clock on the wall and of this process on the CPU."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    @staticmethod
    def mean(steps: Sequence[Spent]) -> Spent:
        return Spent(statistics.mean(s.wall_s for s in steps), statistics.mean(s.cpu_s for s in steps))


@dataclass(frozen=True)
class Ratio:
    """The median, and its bootstrap interval of 95 %."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(steps_s: Sequence[float], without_s: Sequence[float]) -> Ratio:
        ratios = [step / none for step, none in zip(steps_s, without_s, strict=True)]
        draw = random.Random(1)
        medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
        return Ratio(statistics.median(ratios), medians[50], medians[-51])

    def __str__(self) -> str:
        return f"{self.median:.3f} | {self.low:.3f} to {self.high:.3f}"


@dataclass(frozen=True)
class Row:
    """A condition's steps against the steps without a monitor that took turns with them."""

    name: str
    median_s: float
    wall: Ratio
    cpu: Ratio

    @staticmethod
    def of(name: str, steps: Sequence[Spent], without: Sequence[Spent]) -> Row:
        wall = Ratio.of([s.wall_s for s in steps], [s.wall_s for s in without])
        cpu = Ratio.of([s.cpu_s for s in steps], [s.cpu_s for s in without])
        return Row(name, statistics.median(s.wall_s for s in steps), wall, cpu)

    def __str__(self) -> str:
        return f"| {self.name} | {self.median_s * 1e3:.1f} | {self.wall} | {self.cpu} |"


def picture(rows: Sequence[Row], title: str, caption: str) -> str:
    """An SVG of the ratios: a dot with its interval for each row, on a logarithmic scale."""
    width, left, right, top, height = 760, 230, 110, 62, 34
    bottom = top + height * len(rows)
    highest = max(row.wall.high for row in rows) * 1.1
    lowest = min(row.wall.low for row in rows) / 1.02
    ticks = [t for t in (1, 1.1, 1.2, 1.5, 2, 3, 4, 6, 8) if t <= highest]

    def x(ratio: float) -> float:
        return left + (width - left - right) * math.log(ratio / lowest) / math.log(highest / lowest)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 54}" font-family="sans-serif">',
        f'<rect width="{width}" height="{bottom + 54}" fill="#fff"/>',
        f'<text x="16" y="28" font-size="16" font-weight="600" fill="#1c2330">{escape(title)}</text>',
    ]
    for tick in ticks:
        stroke = "#1c2330" if tick == 1 else "#dfe3ea"
        lines.append(f'<path d="M{x(tick):.1f} {top - 8}V{bottom}" stroke="{stroke}"/>')
        lines.append(_text(x(tick), bottom + 16, f"{tick:g}x", "#5a6475", 11, "middle"))
    for number, row in enumerate(rows):
        y = top + height * (number + 0.5)
        name, colour = (f"tsemon, {row.name}", "#0b6e99") if row.name in OURS else (row.name, "#b4532a")
        low, median, high = (x(value) for value in (row.wall.low, row.wall.median, row.wall.high))
        lines += [
            _text(left - 14, y + 4, name, "#1c2330", 13, "end"),
            f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{colour}" stroke-width="6" opacity="0.35"/>',
            f'<circle cx="{median:.1f}" cy="{y}" r="5" fill="{colour}"/>',
            _text(width - 16, y + 4, f"{row.wall.median:.3f}x", colour, 13, "end"),
        ]
    return "\n".join([*lines, _text(16, bottom + 42, caption, "#5a6475", 11, "start"), "</svg>\n"])


def _text(x: float, y: float, text: str, colour: str, size: int, anchor: str) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} font-size="{size}" fill="{colour}">{escape(text)}</text>'
