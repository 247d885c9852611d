"""Write the catalogue's tables into docs/measures.md, between the marks that stand there.

python scripts/measures_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

from tsemon.catalogue import CATALOGUE, COST_LEGEND, Metric

PAGE = Path(__file__).parent.parent / "docs/measures.md"


def page(text: str) -> str:
    """The text with the tables of today between its marks."""
    for name, lines in (("metrics", list(_metrics())), ("costs", list(_costs()))):
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        assert marked.search(text), f"{PAGE.name} has lost its marks around {name}"
        text = marked.sub(lambda found, lines=lines: found[1] + "\n".join(lines) + "\n" + found[2], text)
    return text


def _metrics() -> list[str]:
    header = ["| name | axis | what it says | equation | range | source |", "|---|---|---|---|---|---|"]
    return header + [
        f"| `{m.name}` | {m.axis} | {m.title}{'; also per head' if m.per_head else ''} | {_escaped(m.equation)} "
        f"| {_range(m)} | {m.source} |"
        for m in CATALOGUE
    ]


def _costs() -> list[str]:
    header = ["| name | axis | tier | FLOPs | bytes |", "|---|---|---|---|---|"]
    rows = [f"| `{m.name}` | {m.axis} | {m.tier} | {m.flops} | {m.traffic} |" for m in CATALOGUE]
    return [f"{COST_LEGEND[0].upper()}{COST_LEGEND[1:]}.", "", *header, *rows]


def _range(metric: Metric) -> str:
    if metric.low is None and metric.high is None:
        return "any"
    if metric.high is None:
        return f">= {metric.low:g}"
    return f"<= {metric.high:g}" if metric.low is None else f"{metric.low:g} to {metric.high:g}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
