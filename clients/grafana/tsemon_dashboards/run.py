"""One run, by step where the service is asked and over time where Prometheus is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import table, trend
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as models

from tsemon_dashboards.panels import (
    DECADES,
    GREEN,
    THIRD,
    answers,
    by_step,
    cells,
    choice,
    curves,
    dashboard,
    lines,
    listed,
    matrix,
    property_of,
    renamed,
    typed,
    with_healthy_range,
)
from tsemon_dashboards.queries import (
    ON_SCALE,
    PROMETHEUS,
    REST,
    heatmap,
    moment,
    number,
    over_time,
    over_time_as_table,
    rest,
    series,
    words,
)

LAYERS = ["-1", "0", "1", "2", "3", "4", "5", "6", "7", "8", "10", "12", "16", "20", "24", "32", "47"]
PROFILES = 6
OF_RUN = '{run_id="$run"}'


def run() -> builders.Dashboard:
    measures = rest("/rows/metrics", {"run": "${run}", "kind": "layers"}, "rows", (words("metric"),))
    return dashboard(
        "tsemon-run",
        "tsemon / run",
        "One run: its layers over steps, its loss, its incidents and alerts, and the overhead of tsemon.",
        [
            table_of_the_run(),
            table_of_incidents(),
            builders.Row("By step, from the service"),
            *panels_by_step(),
            builders.Row("Over time, from Prometheus"),
            *panels_over_time(),
            builders.Row("By step, from Prometheus alone: as exact as its scrapes"),
            *panels_by_scraped_step(),
        ],
        variables=[
            choice("run", "Run", rest("/rows/runs", {"limit": "500"}, "rows", RUN_CHOICE)),
            choice("measure", "Measure", measures, first="token_diversity"),
            listed("layer", "Layer", LAYERS, about="-1 is the last layer; any number may be typed."),
            typed("from_step", "From step", "Cuts all charts by step; empty is the first step."),
            typed("to_step", "To step", "Cuts all charts by step; empty is the last step."),
        ],
    ).annotation(incidents_as_annotations())


def panels_by_step() -> Iterator[Builder[models.Panel]]:
    yield cells(
        "${measure}: layer x step",
        heatmap("${measure}", columns=200),
        transformations=matrix(row="step", column="layer", value="value"),
        about=f"A column is a span of steps, a row a layer, the first below. Gray: no finite value. {ON_SCALE}",
    )
    yield curves(
        "${measure}: profile over the layers",
        heatmap("${measure}", columns=PROFILES),
        x="layer",
        transformations=matrix(row="layer", column="step", value="value"),
        about=f"At most {PROFILES} spans of steps, from the first to the last: how the profile came to be. {ON_SCALE}",
    )
    # Least, mean and largest of each bucket of steps.
    spread = partial(curves, transformations=[renamed({}, without=["label"])])
    yield spread("${measure} of layer ${layer}", series("${measure}", layer="${layer}"), about=ON_SCALE)
    yield spread("Loss", series("loss"))
    yield spread("Norm of the gradient", series("total_grad_norm"))
    yield spread("Norm of the parameters", series("total_param_norm"), width=THIRD)
    yield spread("Learning rate", series("learning_rate"), width=THIRD)
    yield spread(
        "What tsemon costs",
        series("overhead_ratio"),
        unit="percentunit",
        about="tsemon's own time as a share of the training's.",
        width=THIRD,
    )
    yield table_of_alerts()


def panels_over_time() -> Iterator[Builder[models.Panel]]:
    yield lines("Loss", over_time(f"max by (run_id) (tsemon_run_loss{OF_RUN})", "loss"), about=MARKS)
    diversity = lines(
        "Token diversity of each layer",
        over_time(f"max by (stack, layer) (tsemon_layer_token_diversity{OF_RUN})", "{{stack}} {{layer}}"),
        about=f"{GREEN} {MARKS}",
    )
    yield with_healthy_range(diversity, "token_diversity").scale_distribution(DECADES)
    speed = f"max by (run_id) (clamp_min(deriv(tsemon_run_process_step{OF_RUN}[5m]), 0))"
    yield lines("Steps per second", over_time(speed, "steps"), width=THIRD)
    firing = over_time(f"max by (rule, severity) (tsemon_alert_firing{OF_RUN})", "{{rule}} ({{severity}})")
    yield lines("Alerts that fire", firing, width=THIRD)
    cost = over_time(f"max by (run_id) (tsemon_run_overhead_ratio{OF_RUN})", "share of the time")
    yield lines("What tsemon costs", cost, unit="percentunit", width=THIRD)


def panels_by_scraped_step() -> Iterator[Builder[models.Panel]]:
    yield scraped("Loss", {"loss": "tsemon_run_loss"})
    diversity = {
        "lowest": "tsemon_layers_token_diversity_min",
        "mean": "tsemon_layers_token_diversity_mean",
        "last layer": "tsemon_layers_token_diversity_last",
    }
    panel = scraped("Token diversity: lowest, mean, last layer", diversity, about=GREEN)
    yield with_healthy_range(panel, "token_diversity").scale_distribution(DECADES)


def scraped(title: str, metrics: Mapping[str, str], about: str = "") -> trend.Panel:
    """Metrics of Prometheus, by the names of their lines, over the step of the run."""
    columns = dict(zip("ABCD", {"step": "tsemon_run_step", **metrics}.items(), strict=False))
    return curves(
        title,
        *(over_time_as_table(f"max by (run_id) ({metric}{OF_RUN})", letter) for letter, (_, metric) in columns.items()),
        source=PROMETHEUS,
        about=about,
        transformations=by_step({f"Value #{letter}": name for letter, (name, _) in columns.items()}),
    )


RUN_CHOICE = (words("label", "__text"), words("run_id", "__value"))
MARKS = "Marks are the incidents of tsemon's own rules, from their start to their end."


def table_of_the_run() -> table.Panel:
    columns = (
        words("label", "Run"),
        words("state", "State"),
        number("attempt", "Attempt"),
        number("num_blocks", "Blocks"),
        number("last_step", "Newest step"),
        number("process_step", "Process at step"),
        number("loss", "Loss"),
        number("num_frames", "Frames"),
        number("open_alerts", "Open alerts"),
        moment("updated_at", "Last heard of"),
        moment("created_at", "Registered"),
    )
    return answers("Run", rest("/rows/runs", {"run": "${run}"}, "rows", columns), height=4)


def table_of_incidents() -> table.Panel:
    columns = (
        words("severity", "Severity"),
        words("state", "State"),
        words("rule", "Cause"),
        words("summary", "What happened"),
        number("left_step", "Since step"),
        number("step", "First alert at step"),
        number("ended_step", "Over at step"),
        words("advice.text", "What to try"),
    )
    panel = answers("Incidents", rest("/incidents", {"run": "${run}", "limit": "100"}, "incidents", columns), height=6)
    return panel.override_by_name("What happened", [property_of("custom.width", 480)])


def table_of_alerts() -> table.Panel:
    columns = (
        words("severity", "Severity"),
        words("state", "State"),
        words("rule", "Rule"),
        words("summary", "What it saw"),
        number("firing_step", "Fired at step"),
        number("resolved_step", "Over at step"),
        moment("opened_at", "Opened"),
        moment("updated_at", "Changed"),
        words("advice.text", "What to try"),
    )
    panel = answers("Alerts", rest("/alerts", {"run": "${run}", "limit": "100"}, "alerts", columns))
    return panel.override_by_name("What it saw", [property_of("custom.width", 480)])


def incidents_as_annotations() -> builders.AnnotationQuery:
    """From when an incident was opened to when it last changed."""
    columns = (
        moment("opened_at", "time"),
        moment("updated_at", "timeEnd"),
        words("rule", "title"),
        words("summary", "text"),
        words("severity", "tags"),
    )
    return (
        builders.AnnotationQuery()
        .name("Incidents")
        .datasource(REST)
        .enable(True)
        .icon_color("red")
        .target(rest("/incidents", {"run": "${run}", "limit": "100"}, "incidents", columns, "Anno"))
        .placement(models.AnnotationQueryPlacement.IN_CONTROLS_MENU)
    )
