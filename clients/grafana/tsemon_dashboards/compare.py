"""Several runs in the same charts, by step."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import trend

from tsemon_dashboards.panels import FULL, HALF, answers, choice, curves, dashboard, listed, matrix, typed
from tsemon_dashboards.queries import Built, moment, number, rest, series, words
from tsemon_dashboards.run import LAYERS, RUN_CHOICE

RUNS = "${runs:csv}"
"""The ids with commas between them, whatever Grafana would do with several values by itself."""
BY_RUN = matrix(row="step", column="label", value="mean")

COLUMNS = (
    words("label", "Run"),
    words("state", "State"),
    number("num_blocks", "Blocks"),
    number("last_step", "Newest step"),
    number("loss", "Loss"),
    number("open_alerts", "Open alerts"),
    number("alerts_at_end", "Alerts at the end"),
    moment("updated_at", "Last heard of"),
)


def compare() -> builders.Dashboard:
    return (
        dashboard(
            "tsemon-compare", "tsemon / compare runs", "Up to 20 runs by step: not when something happened, but where."
        )
        .with_variable(choice("runs", "Runs", rest("/rows/runs", {"limit": "500"}, "rows", RUN_CHOICE), multi=True))
        .with_variable(metrics("number", "Number of the run", "scalars", "loss"))
        .with_variable(metrics("measure", "Measure of a layer", "layers", "token_similarity"))
        .with_variable(
            listed("layer", "Layer", LAYERS, about="-1 is the last layer of each run; any number may be typed.")
        )
        .with_variable(typed("from_step", "From step", "Cuts all charts; empty is the first step."))
        .with_variable(typed("to_step", "To step", "Cuts all charts; empty is the last step."))
        .with_panel(together("Loss", [series("loss", RUNS)], width=FULL))
        .with_panel(together("${number}", [series("${number}", RUNS)]))
        .with_panel(together("${measure} of layer ${layer}", [series("${measure}", RUNS, layer="${layer}")]))
        .with_panel(together("Token similarity, last layer", [series("token_similarity", RUNS, layer="-1")]))
        .with_panel(together("Norm of the gradient", [series("total_grad_norm", RUNS)]))
        .with_panel(answers("Runs", rest("/rows/runs", {"run": RUNS}, "rows", COLUMNS)))
    )


def together(title: str, queries: Sequence[Built], *, width: int = HALF) -> trend.Panel:
    """A line for each run: the mean of each bucket."""
    return curves(title, queries, transformations=BY_RUN, width=width)


def metrics(name: str, label: str, kind: str, first: str) -> builders.QueryVariable:
    """What any of the chosen runs has recorded."""
    return choice(
        name, label, rest("/rows/metrics", {"run": RUNS, "kind": kind}, "rows", (words("metric"),)), first=first
    )
