"""What the dashboards have in common: kinds of panels, variables, transformations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from grafana_foundation_sdk.builders import common, heatmap, stat, table, timeseries, trend
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    DataSourceRef,
    GraphDrawStyle,
    GraphThresholdsStyleMode,
    HeatmapCellLayout,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode

from tsemon_answers.healthy import HEALTHY
from tsemon_dashboards.queries import PROMETHEUS, REST, Built

LinePanel = TypeVar("LinePanel", timeseries.Panel, trend.Panel)
Query = Builder[Dataquery]
Transformations = Sequence[models.DataTransformerConfig]

DECADES = common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10)
"""The scale of a logarithmic axis."""

GREEN = "Green: the range of healthy recorded runs over all depths."

FULL, HALF, THIRD, QUARTER = 24, 12, 8, 6
"""Widths, of 24 columns."""
TALL, LOW = 9, 4
"""Heights, of 30 pixels each."""


def dashboard(
    uid: str,
    title: str,
    description: str,
    panels: Iterable[Builder[models.Panel] | builders.Row],
    *,
    variables: Iterable[Builder[models.VariableModel]] = (),
    span: str = "now-6h",
) -> builders.Dashboard:
    """A dashboard with links to the others of tsemon; a row is the heading of the panels after it."""
    others = builders.DashboardLink("tsemon").type(models.DashboardLinkType.DASHBOARDS).tags(["tsemon"])
    page = (
        builders.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["tsemon"])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time(span, "now")
        .timezone("browser")
        .refresh("30s")
        .link(others.as_dropdown(True).include_vars(True).keep_time(True))
    )
    for variable in variables:
        page = page.with_variable(variable)
    for panel in panels:
        page = page.with_row(panel) if isinstance(panel, builders.Row) else page.with_panel(panel)
    return page


# Panels over time


def lines(title: str, *queries: Query, unit: str = "short", about: str = "", width: int = HALF) -> timeseries.Panel:
    """Lines over time."""
    panel = timeseries.Panel().title(title).description(about).unit(unit).span(width).height(TALL)
    panel = panel.targets(list(queries))
    return panel.datasource(PROMETHEUS).fill_opacity(0).legend(_legend()).tooltip(_tooltip())


def with_healthy_range(panel: LinePanel, metric: str) -> LinePanel:
    """The panel with a green area from the lowest value in healthy recorded runs, at any depth."""
    low = min(HEALTHY[metric]["low"])
    steps = [models.Threshold(value=None, color="transparent"), models.Threshold(value=low, color="green")]
    thresholds = builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    style = common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.AREA)
    return panel.thresholds(thresholds).thresholds_style(style)


def figure(title: str, query: Query, *, bad_from: float | None = None, about: str = "") -> stat.Panel:
    """One number; red from `bad_from` on."""
    steps = [models.Threshold(value=None, color="green")]
    if bad_from is not None:
        steps.append(models.Threshold(value=bad_from, color="red"))
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(PROMETHEUS)
        .with_target(query)
        .unit("short")
        .span(QUARTER)
        .height(LOW)
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.VALUE)
        .thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    )


def rows(
    title: str,
    queries: Sequence[Query],
    source: DataSourceRef,
    *,
    transformations: Transformations = (),
    about: str = "",
    height: int = TALL,
) -> table.Panel:
    """A table."""
    panel = table.Panel().title(title).description(about).datasource(source).targets(list(queries))
    return panel.transformations(list(transformations)).span(FULL).height(height).filterable(True)


def answers(title: str, query: Built, *, height: int = TALL) -> table.Panel:
    """A table of what the service answers, with columns in the order of the query: Infinity sorts them by name."""
    order = [column.text for column in query.query.columns]
    return rows(title, [query], REST, transformations=[renamed({}, order=order)], height=height)


# Panels by step


def curves(
    title: str,
    *queries: Query,
    x: str = "step",
    transformations: Transformations = (),
    source: DataSourceRef = REST,
    unit: str = "short",
    about: str = "",
    width: int = HALF,
) -> trend.Panel:
    """Lines over a number, which must rise from row to row: or Trend refuses to draw."""
    return (
        trend.Panel()
        .title(title)
        .description(about)
        .datasource(source)
        .targets(list(queries))
        .transformations(list(transformations))
        .x_field(x)
        .unit(unit)
        .span(width)
        .height(TALL)
        .draw_style(GraphDrawStyle.LINE)
        .show_points(VisibilityMode.NEVER)
        .span_nulls(True)  # runs that are compared have their samples at different steps
        .legend(_legend())
        .tooltip(_tooltip())
    )


def cells(title: str, query: Query, *, transformations: Transformations, about: str = "") -> heatmap.Panel:
    """A heat map whose rows are the columns of the frame after the first, and whose x is the first, a step."""
    return (
        heatmap.Panel()
        .title(title)
        .description(about)
        .datasource(REST)
        .with_target(query)
        .transformations(list(transformations))
        .span(FULL)
        .height(TALL + 3)
        .calculate(False)
        .rows_frame(heatmap.RowsHeatmapOptions().layout(HeatmapCellLayout.UNKNOWN).value("value"))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Viridis").steps(64))
        .filter_values(heatmap.FilterValueRange().le(-1e30))  # by default 1e-9: what is 0 or negative would be blank
        .y_axis(heatmap.YAxisConfig().axis_label("layer"))
        .cell_gap(0)
        .show_legend()
    )


# Transformations


def transformation(id_val: str, **options: object) -> models.DataTransformerConfig:
    return models.DataTransformerConfig(id_val=id_val, options=options)


def matrix(*, row: str, column: str, value: str) -> Transformations:
    """Rows (row, column, value) as a column of `row` that rises, and one for each value of `column`."""
    corner = f"{row}\\{column}"
    return (
        transformation("groupingToMatrix", columnField=column, rowField=row, valueField=value, emptyValue="null"),
        transformation("sortBy", fields={}, sort=[{"field": corner}]),
        renamed({corner: row}),
    )


def renamed(
    names: Mapping[str, str], *, without: Sequence[str] = (), order: Sequence[str] = ()
) -> models.DataTransformerConfig:
    """Columns under other names, without some, in an order: those that `order` does not name come last."""
    return transformation(
        "organize",
        excludeByName=dict.fromkeys(without, True),
        indexByName={name: place for place, name in enumerate(order)},
        renameByName=dict(names),
    )


def by_step(names: Mapping[str, str], step: str = "Value #A") -> Transformations:
    """Tables of Prometheus, one of which has the step, as one table over the step.

    A step comes more than once where Prometheus scrapes faster than the training samples, and falls where a run goes back
    to a checkpoint; Trend draws neither, so the last value of each step is kept, in the order of steps.
    """
    values = [name for name in names if name != step]
    fields: dict[str, object] = {name: {"aggregations": ["lastNotNull"], "operation": "aggregate"} for name in values}
    return (
        transformation("joinByField", byField="Time", mode="inner"),
        transformation("groupBy", fields=fields | {step: {"aggregations": [], "operation": "groupby"}}),
        transformation("sortBy", fields={}, sort=[{"field": step}]),
        renamed({step: names[step]} | {f"{name} (lastNotNull)": names[name] for name in values}),
    )


# Variables


def choice(
    name: str, label: str, query: Built, *, multi: bool = False, first: str | None = None
) -> builders.QueryVariable:
    """A variable whose values come from the service; `first` is chosen where nobody chose."""
    asked = query.query.to_json() | {"refId": "variable"}
    variable = builders.QueryVariable(name).label(label).datasource(REST).multi(multi)
    variable = variable.query({"refId": "variable", "queryType": "infinity", "infinityQuery": asked})
    variable = variable.refresh(models.VariableRefresh.ON_DASHBOARD_LOAD)
    return (
        variable if first is None else variable.current(models.VariableOption(text=first, value=first, selected=True))
    )


def labels(name: str, label: str, query: str) -> builders.QueryVariable:
    """A variable whose values are those of a label in Prometheus; none chosen is all."""
    return (
        builders.QueryVariable(name)
        .label(label)
        .datasource(PROMETHEUS)
        .query({"query": query, "refId": "variable"})
        .definition(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def listed(name: str, label: str, values: Sequence[str], *, about: str = "") -> builders.CustomVariable:
    """A variable with a few values, the first of which is chosen; others may be typed."""
    options = [models.VariableOption(text=one, value=one, selected=one == values[0]) for one in values]
    variable = builders.CustomVariable(name).label(label).description(about).values(",".join(values))
    return variable.options(options).current(options[0])


def typed(name: str, label: str, about: str) -> builders.TextBoxVariable:
    """A variable that is typed in; empty at first."""
    empty = models.VariableOption(text="", value="", selected=True)
    return builders.TextBoxVariable(name).label(label).description(about).default_value("").current(empty)


def property_of(id_val: str, value: object) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val=id_val, value=value)


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull"])
    )


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
