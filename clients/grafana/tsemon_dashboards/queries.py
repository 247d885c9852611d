"""What panels ask: Prometheus over time, and the REST interface by step through Grafana's Infinity data source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.cog import builder, variants
from grafana_foundation_sdk.models.common import DataSourceRef
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PROMETHEUS = DataSourceRef(type_val="prometheus", uid="tsemon-prometheus")
REST = DataSourceRef(type_val="yesoreyeram-infinity-datasource", uid="tsemon-rest")

ColumnType = Literal["string", "number", "timestamp"]


def over_time(expr: str, legend: str = "", ref_id: str = "A") -> prometheus.Dataquery:
    """A range query, for panels whose axis is time."""
    return prometheus.Dataquery().datasource(PROMETHEUS).expr(expr).range().legend_format(legend).ref_id(ref_id)


def now(expr: str, legend: str = "", ref_id: str = "A") -> prometheus.Dataquery:
    """An instant query."""
    return prometheus.Dataquery().datasource(PROMETHEUS).expr(expr).instant().legend_format(legend).ref_id(ref_id)


def now_as_table(expr: str, ref_id: str = "A") -> prometheus.Dataquery:
    """An instant query with a row per series and a column per label; the value is in `Value #A`."""
    return now(expr, ref_id=ref_id).format(PromQueryFormat.TABLE)


def over_time_as_table(expr: str, ref_id: str = "A") -> prometheus.Dataquery:
    """A range query with a row per moment; the value is in `Value #A`."""
    return over_time(expr, ref_id=ref_id).format(PromQueryFormat.TABLE)


def named(expr: str) -> str:
    """Return the value of each run of the chosen projects, with the names of the run.

    `max by` comes first because every server on a shared database exports every run.
    """
    names = 'max by (run_id, project, run) (tsemon_run_info{project=~"$project"})'
    return f"max by (run_id) ({expr}) * on (run_id) group_left (project, run) {names}"


@dataclass(frozen=True)
class Column:
    """One key of each row, as a column."""

    selector: str
    """The key in the reply."""
    text: str
    """The column's name in Grafana."""
    kind: ColumnType


def number(selector: str, text: str | None = None) -> Column:
    return Column(selector, text or selector, "number")


def words(selector: str, text: str | None = None) -> Column:
    return Column(selector, text or selector, "string")


def moment(selector: str, text: str | None = None) -> Column:
    return Column(selector, text or selector, "timestamp")


@dataclass(frozen=True)
class Infinity(variants.Dataquery):
    """A query of Infinity, which the SDK has no model of: JSON from a path below the data source's URL.

    Its backend parser is the one that works in alert rules and public dashboards, too.
    """

    path: str
    params: Mapping[str, str]
    rows: str
    """The key of the reply that has the rows."""
    columns: Sequence[Column]
    ref_id: str = "A"

    def to_json(self) -> dict[str, object]:
        return {
            "refId": self.ref_id,
            "datasource": REST,
            "type": "json",
            "source": "url",
            "parser": "backend",
            "format": "table",
            "url": self.path,
            "url_options": {
                "method": "GET",
                "data": "",
                "params": [{"key": key, "value": value} for key, value in self.params.items()],
            },
            "root_selector": self.rows,
            "columns": [{"selector": one.selector, "text": one.text, "type": one.kind} for one in self.columns],
            "filters": [],
        }


@dataclass(frozen=True)
class Built(builder.Builder[variants.Dataquery]):
    """What is ready, where the SDK asks for a builder."""

    query: Infinity

    def build(self) -> variants.Dataquery:
        return self.query


def rest(path: str, params: Mapping[str, str], rows: str, columns: Sequence[Column], ref_id: str = "A") -> Built:
    return Built(Infinity(f"/api/v1{path}", params, rows, columns, ref_id))


ZOOM = {"from_step": "${from_step}", "to_step": "${to_step}"}
"""The steps that the dashboard is cut to; the service takes an empty text as none."""


SCALE = {"scale": "catalogue"}
"""Scale of metrics by layer, as in tsemon's own web UI."""
ON_SCALE = "log10 of a metric that the catalogue shows on a log scale, such as token_diversity: -3 is 0.001."


def series(metric: str, run: str = "${run}", *, layer: str | None = None) -> Built:
    """One metric by step: a row per bucket and run."""
    params = {"run": run, "metric": metric} | ({} if layer is None else {"layer": layer} | SCALE) | ZOOM
    params |= {"points": "500"}
    columns = (number("step"), words("label"), number("min"), number("mean"), number("max"))
    return rest("/rows/series", params, "rows", columns)


def heatmap(metric: str, columns: int) -> Built:
    """One metric by step and layer: a row per cell."""
    params = {"run": "${run}", "metric": metric} | SCALE | ZOOM | {"columns": str(columns)}
    return rest("/rows/heatmap", params, "rows", (number("step"), number("layer"), number("value")))
