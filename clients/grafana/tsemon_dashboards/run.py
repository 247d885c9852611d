"""One run, by step where the service is asked and over time where Prometheus is."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import table, trend
from grafana_foundation_sdk.models import dashboard as models

from tsemon_dashboards.panels import (
    HALF,
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
)
from tsemon_dashboards.queries import (
    PROMETHEUS,
    REST,
    Built,
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


def run() -> builders.Dashboard:
    page = (
        dashboard(
            "tsemon-run", "tsemon / run", "One run: its layers over steps, its loss, its alerts, what tsemon costs it."
        )
        .with_variable(choice("run", "Run", rest("/rows/runs", {"limit": "500"}, "rows", RUN_CHOICE)))
        .with_variable(
            choice(
                "measure",
                "Measure",
                rest("/rows/metrics", {"run": "${run}", "kind": "layers"}, "rows", (words("metric"),)),
                first="token_similarity",
            )
        )
        .with_variable(listed("layer", "Layer", LAYERS, about="-1 is the last layer; any number may be typed."))
        .with_variable(typed("from_step", "From step", "Cuts all charts by step; empty is the first step."))
        .with_variable(typed("to_step", "To step", "Cuts all charts by step; empty is the last step."))
        .annotation(alerts_as_annotations())
    )
    page = page.with_panel(table_of_the_run())
    page = (
        page.with_row(builders.Row("By step, from the service"))
        .with_panel(
            cells(
                "${measure}: layer x step",
                heatmap("${measure}", columns=200),
                transformations=matrix(row="step", column="layer", value="value"),
                about="A column is a span of steps, a row a layer, the first below. Gray: no finite value.",
            )
        )
        .with_panel(
            curves(
                "${measure}: profile over the layers",
                [heatmap("${measure}", columns=PROFILES)],
                x="layer",
                transformations=matrix(row="layer", column="step", value="value"),
                about=f"At most {PROFILES} spans of steps, from the first to the last: how the profile came to be.",
            )
        )
        .with_panel(spread("${measure} of layer ${layer}", series("${measure}", layer="${layer}")))
        .with_panel(spread("Loss", series("loss")))
        .with_panel(spread("Norm of the gradient", series("total_grad_norm")))
        .with_panel(spread("Norm of the parameters", series("total_param_norm"), width=THIRD))
        .with_panel(spread("Learning rate", series("learning_rate"), width=THIRD))
        .with_panel(
            spread(
                "What tsemon costs",
                series("overhead_ratio"),
                unit="percentunit",
                about="tsemon's own time as a share of the training's.",
                width=THIRD,
            )
        )
        .with_panel(table_of_alerts())
    )
    of_run = '{run_id="$run"}'
    return (
        page.with_row(builders.Row("Over time, from Prometheus"))
        .with_panel(lines("Loss", [over_time(f"max by (run_id) (tsemon_run_loss{of_run})", "loss")], about=MARKS))
        .with_panel(
            lines(
                "Token similarity of each layer",
                [over_time(f"max by (layer) (tsemon_layer_token_similarity{of_run})", "{{layer}}")],
                unit="percentunit",
                about=MARKS,
            )
        )
        .with_panel(
            lines(
                "Steps per second",
                [over_time(f"max by (run_id) (clamp_min(deriv(tsemon_run_process_step{of_run}[5m]), 0))", "steps")],
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "Alerts that fire",
                [over_time(f"max by (rule, severity) (tsemon_alert_firing{of_run})", "{{rule}} ({{severity}})")],
                width=THIRD,
            )
        )
        .with_panel(
            lines(
                "What tsemon costs",
                [over_time(f"max by (run_id) (tsemon_run_overhead_ratio{of_run})", "share of the time")],
                unit="percentunit",
                width=THIRD,
            )
        )
        .with_row(builders.Row("By step, from Prometheus alone: as exact as its scrapes"))
        .with_panel(
            curves(
                "Loss",
                [
                    over_time_as_table(f"max by (run_id) (tsemon_run_step{of_run})", "A"),
                    over_time_as_table(f"max by (run_id) (tsemon_run_loss{of_run})", "B"),
                ],
                source=PROMETHEUS,
                transformations=by_step({"Value #A": "step", "Value #B": "loss"}),
            )
        )
        .with_panel(
            curves(
                "Token similarity: largest, mean, last layer",
                [
                    over_time_as_table(f"max by (run_id) (tsemon_run_step{of_run})", "A"),
                    over_time_as_table(f"max by (run_id) (tsemon_layers_token_similarity_max{of_run})", "B"),
                    over_time_as_table(f"max by (run_id) (tsemon_layers_token_similarity_mean{of_run})", "C"),
                    over_time_as_table(f"max by (run_id) (tsemon_layers_token_similarity_last{of_run})", "D"),
                ],
                source=PROMETHEUS,
                unit="percentunit",
                transformations=by_step(
                    {"Value #A": "step", "Value #B": "largest", "Value #C": "mean", "Value #D": "last layer"}
                ),
            )
        )
    )


RUN_CHOICE = (words("label", "__text"), words("run_id", "__value"))
MARKS = "Marks are the alerts of tsemon's own rules, from opened to over."


def spread(title: str, query: Built, *, unit: str = "short", about: str = "", width: int = HALF) -> trend.Panel:
    """Least, mean and largest of each bucket of steps."""
    return curves(title, [query], transformations=[renamed({}, without=["label"])], unit=unit, about=about, width=width)


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


def alerts_as_annotations() -> builders.AnnotationQuery:
    """From when an alert was opened to when its state last changed, which is when it was over where it is."""
    columns = (
        moment("opened_at", "time"),
        moment("updated_at", "timeEnd"),
        words("rule", "title"),
        words("summary", "text"),
        words("severity", "tags"),
    )
    return (
        builders.AnnotationQuery()
        .name("Alerts")
        .datasource(REST)
        .enable(True)
        .icon_color("red")
        .target(rest("/alerts", {"run": "${run}", "limit": "100"}, "alerts", columns, "Anno"))
        .placement(models.AnnotationQueryPlacement.IN_CONTROLS_MENU)
    )
