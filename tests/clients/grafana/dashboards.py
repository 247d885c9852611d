"""What the committed files ask, with the variables filled in as Grafana would."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[3] / "clients/grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "dashboards").glob("*.json"))}


def provisioned(name):
    """A file of the folder `provisioning`."""
    return yaml.safe_load((FOLDER / "provisioning" / name).read_text())


RULES = [rule for group in provisioned("alerting/rules.yaml")["groups"] for rule in group["rules"]]


@dataclass(frozen=True)
class Query:
    """A query, and where it stands."""

    place: str
    target: dict

    def __str__(self):
        return self.place

    @property
    def is_of_prometheus(self):
        return self.target["datasource"]["type"] == "prometheus"


def panels(dashboard):
    return [panel for panel in DASHBOARDS[dashboard]["panels"] if panel["type"] != "row"]


def place_of(dashboard, panel):
    return f"{dashboard} {panel['id']} {panel['title']}"


def queries():
    """Every query of every panel, variable and annotation."""
    for name, dashboard in DASHBOARDS.items():
        for panel in panels(name):
            for target in panel["targets"]:
                yield Query(f"{place_of(name, panel)}, {target['refId']}", target)
        for variable in dashboard["templating"].get("list", []):
            if variable["type"] == "query" and "infinityQuery" in variable["query"]:
                yield Query(f"{name} variable {variable['name']}", variable["query"]["infinityQuery"])
        for annotation in dashboard["annotations"].get("list", []):
            yield Query(f"{name} annotation {annotation['name']}", annotation["target"])


def filled(text, values):
    """The text with `$name`, `${name}` and `${name:csv}` as Grafana fills them in. Fails for a name without a value."""

    def value_of(match):
        name, form = match["braced"] or match["bare"], match["form"]
        value = values[name]
        if isinstance(value, str):
            return value
        # Without a form, Grafana writes several values for a data source of this kind as {a,b}.
        return ",".join(value) if form == "csv" else "{" + ",".join(value) + "}"

    return re.sub(r"\$(?:\{(?P<braced>\w+)(?::(?P<form>\w+))?\}|(?P<bare>\w+))", value_of, text)
