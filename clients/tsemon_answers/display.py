"""How records look in a notebook. All text of theirs is escaped: names are what somebody sent.

A heat map is a picture of one pixel per value, made here, so that it needs no package and no connection.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import Any

from pydantic import BaseModel

from tsemon.catalogue import Metric
from tsemon_answers.healthy import extent

VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
"""The page's colours for what goes one way: ordered by lightness, safe for colour-blind eyes."""
STOPS = [bytes.fromhex(colour) for colour in VIRIDIS]
LEAST_LOG_SPAN = 1000
"""A metric with an upper limit has at least this range on a log scale, as on the page."""
HEALTHY_MARK, NO_MARK = bytes.fromhex("1b7a3d"), bytes.fromhex("ffffff")
NOT_FINITE = bytes.fromhex("d0d0d0")
MAX_ROWS = 50
"""Of a list; all of them are in `to_pandas()`."""
LISTED = {
    "Run": "project run condition state last_step loss open_alerts tags updated_at run_id",
    "Alert": "project run rule severity state firing_step resolved_step summary alert_id",
    "Incident": "project run family severity rule blocks left_step step state summary incident_id",
    "RuleVersion": "name version origin enabled created_at",
}
"""The columns of a list, by the kind of its records; of others all fields are shown."""


def heatmap(
    metric: str, steps: Sequence[int], layers: int, columns: Sequence[Sequence[float | None]], about: Metric | None
) -> str:
    """Draw `columns[step][layer]` as a picture with the first layer at the bottom, and the meaning of its colors."""
    if not steps:
        return f"<p>{escape(metric)}: no samples in this range.</p>"
    scale = Scale(about, [value for values in columns for value in values])
    rows = [
        [NOT_FINITE if value is None else scale.colour(value) for value in layer]
        for layer in reversed(list(zip(*columns, strict=True)))
    ]
    text = f"{metric}, {layers} layers, steps {steps[0]} to {steps[-1]}"
    places = [i / 119 for i in range(120)]
    key, healthy = [[scale.at(place) for place in places]] * 2, extent(metric)
    if healthy is not None:
        low, high = map(scale.position, healthy)
        key.append([HEALTHY_MARK if low <= place <= high else NO_MARK for place in places])
    legend = f"{number(scale.low)} {image(key, 120, 5 * len(key), 'from low to high')} {number(scale.high)}"
    legend += " (log scale)" if scale.is_log else ""
    if healthy is not None:
        legend += (
            f"; green line: {number(healthy[0])} to {number(healthy[1])} in healthy recorded runs, over all depths"
        )
    return (
        f"<div>{image(rows, 640, min(480, max(96, 10 * layers)), text)}"
        f"<div>{escape(text)}; the first layer is at the bottom. {legend}; grey: not finite or not there.</div></div>"
    )


def records(model: type[BaseModel], records: Sequence[BaseModel]) -> str:
    """A table with a row per record, and columns that fit on a screen."""
    names = LISTED[model.__name__].split() if model.__name__ in LISTED else list(model.model_fields)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{cell(getattr(record, name))}</td>' for name in names)}</tr>"
        for record in records[:MAX_ROWS]
    )
    more = len(records) - MAX_ROWS
    note = f"<p>and {more} more; all are in to_pandas()</p>" if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def table(facts: Iterable[tuple[str, Any]]) -> str:
    """Facts under one another; those without a value are left out."""
    rows = (
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{cell(value)}</td></tr>"
        for name, value in facts
        if value is not None and value != ""
    )
    return f"<table>{''.join(rows)}</table>"


def cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return escape(moment(value))
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return escape(", ".join(map(str, value)))
    return escape(str(value))


def name_of(text: str) -> str:
    """A name inside a line, which letters that are written from right to left do not turn around."""
    return f"<bdi>{escape(text)}</bdi>"


def moment(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def number(value: float) -> str:
    return f"{value:.4g}"


class Scale:
    """From values to colours: the whole range of a bounded metric, otherwise that of the values.

    The log scale of a bounded metric has at least three decades.
    """

    def __init__(self, metric: Metric | None, values: Iterable[float | None]) -> None:
        self.is_log = metric is not None and metric.log_scale
        usable = [value for value in values if value is not None and (value > 0 or not self.is_log)]
        self.low, self.high = min(usable, default=0.0), max(usable, default=1.0)
        if metric is not None and metric.low is not None and metric.high is not None:
            # With the range of its data, a healthy run would have as dark a layer as one that fails.
            self.low = min(self.low, metric.high / LEAST_LOG_SPAN) if self.is_log else metric.low
            self.high = metric.high
        if self.is_log and not usable:
            self.low = 1e-3

    def colour(self, value: float) -> bytes:
        """Three bytes, red, green and blue."""
        return self.at(self.position(value))

    def position(self, value: float) -> float:
        """The place of a value: 0 at the lowest, 1 at the highest."""
        low, high = self._turned(self.low), self._turned(self.high)
        return (self._turned(value) - low) / (high - low) if high > low else 0.5

    def at(self, position: float) -> bytes:
        """The colour of a place between 0, the lowest, and 1."""
        place = min(max(position, 0.0), 1.0) * (len(STOPS) - 1)
        i = min(int(place), len(STOPS) - 2)
        return bytes(round(a + (b - a) * (place - i)) for a, b in zip(STOPS[i], STOPS[i + 1], strict=True))

    def _turned(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.is_log else value


def image(rows: Sequence[Sequence[bytes]], width: int, height: int, text: str) -> str:
    """A picture of one pixel per colour, drawn in so many pixels of the screen."""
    source = base64.b64encode(png(rows)).decode("ascii")
    style = f"width:{width}px;height:{height}px;max-width:100%;image-rendering:pixelated"
    return f"<img src='data:image/png;base64,{source}' alt='{escape(text)}' title='{escape(text)}' style='{style}'>"


def png(rows: Sequence[Sequence[bytes]]) -> bytes:
    """Rows of colours as a PNG file."""
    pixels = b"".join(b"\x00" + b"".join(row) for row in rows)  # 0: the row is not filtered
    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 2, 0, 0, 0)  # 8 bits, red, green and blue
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
