"""Families of samples as the text that Prometheus reads, in its own format and in OpenMetrics.

Written by hand: prometheus_client takes ten times as long for a page of tens of thousands of samples, most of it for what
is the same at each scrape. `benchmarks/metrics_cost.py` compares them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

FamilyKind = Literal["gauge", "counter", "histogram", "info"]

_SUFFIXES = {"counter": "_total", "info": "_info"}
_NO_NAME = re.compile("[^a-zA-Z0-9_]")
_SPECIAL = {"\\": r"\\", "\n": r"\n", '"': r"\""}


class Family(NamedTuple):
    """All samples of one metric."""

    name: str
    """Without the `_total` of a counter and the `_info` of an info."""
    kind: FamilyKind
    about: str
    samples: str
    """A line for each, without timestamps: a sample that carries one outlives its run by five minutes in Prometheus."""


def page(families: Iterable[Family], content_type: str) -> bytes:
    """All of it, in one of the two formats."""
    parts: list[str] = []
    for family in families:
        name, kind, about = family.name, family.kind, family.about
        if content_type != OPEN_METRICS:
            name += _SUFFIXES.get(kind, "")
            kind = "gauge" if kind == "info" else kind
        parts += (f"# HELP {name} {_escaped_help(about)}\n# TYPE {name} {kind}\n", family.samples)
    if content_type == OPEN_METRICS:
        parts.append("# EOF\n")
    # Text that is not Unicode, were there any, shall cost its own characters and not the page.
    return "".join(parts).encode(errors="replace")


def content_type_for(accept: str) -> str:
    """The format that a scraper prefers. Prometheus' own is for those that name neither."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for choice in accept.split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        if kind in weights:
            weights[kind] = max(weights[kind], _weight(parameters))
    is_open = weights["application/openmetrics-text"] > 0
    return OPEN_METRICS if is_open and weights["application/openmetrics-text"] >= weights["text/plain"] else PLAIN


def _weight(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def sample(name: str, labels: str, value: float) -> str:
    """A line; `labels` come from `labels_of`."""
    return f"{name}{labels} {number(value)}\n"


def labels_of(labels: Mapping[str, str]) -> str:
    """Labels as they stand behind a name, sorted; nothing where there are none."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in sorted(labels.items())) + "}"


def escaped(text: str) -> str:
    """The value of a label."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def number(value: float) -> str:
    """A value, exactly."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


@lru_cache(maxsize=4096)
def sanitised(name: str) -> str:
    """A part of a metric's name: letters, digits and underscores. A colon is for the names that recording rules make."""
    return _NO_NAME.sub("_", name)


def as_spelled(text: str) -> str:
    """Lines whose values were written with `%g`, with NaN and infinities as Prometheus spells them."""
    for written, spelled in (("} nan\n", "} NaN\n"), ("} inf\n", "} +Inf\n"), ("} -inf\n", "} -Inf\n")):
        text = text.replace(written, spelled)  # no label holds a line break
    return text
