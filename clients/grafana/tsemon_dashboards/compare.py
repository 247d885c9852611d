"""Several runs in the same charts, by step."""

from __future__ import annotations

from functools import partial

from grafana_foundation_sdk.builders import dashboard as builders

from tsemon_dashboards.panels import FULL, answers, choice, curves, dashboard, listed, matrix, typed
from tsemon_dashboards.queries import ON_SCALE, moment, number, rest, series, words
from tsemon_dashboards.run import LAYERS, RUN_CHOICE

RUNS = "${runs:csv}"
"""The ids with commas between them, whatever Grafana would do with several values by itself."""
BY_RUN = matrix(row="step", column="label", value="mean")
"""A line for each run: the mean of each bucket."""

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
    together = partial(curves, transformations=BY_RUN)
    panels = [
        together("Loss", series("loss", RUNS), width=FULL),
        together("${number}", series("${number}", RUNS)),
        together("${measure} of layer ${layer}", series("${measure}", RUNS, layer="${layer}"), about=ON_SCALE),
        together("Norm of the gradient", series("total_grad_norm", RUNS), width=FULL),
        answers("Runs", rest("/rows/runs", {"run": RUNS}, "rows", COLUMNS)),
    ]
    return dashboard(
        "tsemon-compare",
        "tsemon / compare runs",
        "Up to 20 runs by step: not when something happened, but where.",
        panels,
        variables=[
            choice("runs", "Runs", rest("/rows/runs", {"limit": "500"}, "rows", RUN_CHOICE), multi=True),
            metrics("number", "Number of the run", "scalars", "loss"),
            metrics("measure", "Measure of a layer", "layers", "token_diversity"),
            listed("layer", "Layer", LAYERS, about="-1 is the last layer of each run; any number may be typed."),
            typed("from_step", "From step", "Cuts all charts; empty is the first step."),
            typed("to_step", "To step", "Cuts all charts; empty is the last step."),
        ],
    )


def metrics(name: str, label: str, kind: str, first: str) -> builders.QueryVariable:
    """What any of the chosen runs has recorded."""
    return choice(
        name, label, rest("/rows/metrics", {"run": RUNS, "kind": kind}, "rows", (words("metric"),)), first=first
    )
