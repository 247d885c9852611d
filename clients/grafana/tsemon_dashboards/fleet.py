"""All runs at a glance: which are there, how they do, which alerts fire. Needs Prometheus alone."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Panel

from tsemon_dashboards.panels import (
    DECADES,
    dashboard,
    figure,
    labels,
    lines,
    property_of,
    renamed,
    rows,
    transformation,
)
from tsemon_dashboards.queries import PROMETHEUS, named, now, now_as_table, over_time

NAME = "{{project}}/{{run}}"
SILENT_S = 300


def fleet() -> builders.Dashboard:
    return dashboard(
        "tsemon-fleet",
        "tsemon / fleet",
        "All runs that are in /metrics: those that run, or ended a minute ago.",
        panels(),
        variables=[labels("project", "Project", "label_values(tsemon_run_info, project)")],
    )


def panels() -> Iterator[Builder[Panel]]:
    training = now('count(max by (run_id) (tsemon_run_info{project=~"$project"})) or vector(0)')
    yield figure("Runs", training, about="Runs that train now.")
    yield figure(
        "Alerts that fire",
        now(f"sum({named(ALERTS)}) or vector(0)"),
        bad_from=1,
        about="tsemon's own rules, which look at every frame.",
    )
    yield figure(
        "Runs with NaN or Inf",
        now(f"count({named('tsemon_run_nonfinite_values')} > 0) or vector(0)"),
        bad_from=1,
        about="Their newest frame has values that are not finite.",
    )
    yield figure(
        "Silent runs",
        now(f"count({named(SINCE_SEEN)} > {SILENT_S}) or vector(0)"),
        bad_from=1,
        about=f"Not heard of for {SILENT_S // 60} minutes, and nobody said that they ended.",
    )
    yield table_of_runs()
    yield table_of_alerts()
    yield lines(
        "Token diversity, lowest of the layers",
        over_time(named("tsemon_layers_token_diversity_min"), NAME),
        about="At 1e-6, the tokens of a layer differ in a millionth of their energy: the layer sees only their mean.",
    ).scale_distribution(DECADES)
    yield lines("Loss", over_time(named("tsemon_run_loss"), NAME))
    yield lines(
        "Steps per second",
        over_time(named("clamp_min(deriv(tsemon_run_process_step[5m]), 0)"), NAME),
        about="Where the process is, by its heartbeats: 0 is a run that is stuck.",
    )
    yield lines(
        "Alerts that fire, by family",
        over_time(f"sum by (family) ({ALERTS_BY_FAMILY})", "{{family}}"),
        about="tse: token similarity. entropy, rank, norm, dead, diverge, data, loss, liveness.",
    ).min(0)


ALERTS = "sum by (run_id) (max by (run_id, rule, family, severity) (tsemon_alert_firing))"
"""How many fire of each run, whichever service tells of them."""
ALERTS_BY_FAMILY = (
    "max by (run_id, rule, family) (tsemon_alert_firing) "
    '* on (run_id) group_left (project) max by (run_id, project) (tsemon_run_info{project=~"$project"})'
)
SINCE_SEEN = "time() - tsemon_run_last_seen_timestamp_seconds"
SINCE_STEPPED = "time() - tsemon_run_stepped_timestamp_seconds"


def table_of_runs() -> table.Panel:
    columns = {
        "Step": "tsemon_run_process_step",
        "Loss": "tsemon_run_loss",
        "Diversity": "tsemon_layers_token_diversity_min",
        "NaN or Inf": "tsemon_run_nonfinite_values",
        "Since heard of": SINCE_SEEN,
        "Since it moved": SINCE_STEPPED,
    }
    letters = "ABCDEF"
    to_run = {"title": "Show the run", "url": "/d/tsemon-run?var-run=${__data.fields.run_id}"}
    panel = rows(
        "Runs now",
        [now_as_table(named(expr), letter) for letter, expr in zip(letters, columns.values(), strict=True)],
        PROMETHEUS,
        transformations=[
            transformation("merge"),
            renamed(
                {f"Value #{letter}": name for letter, name in zip(letters, columns, strict=True)}
                | {"project": "Project", "run": "Run"},
                without=["Time"],
                order=["project", "run", *(f"Value #{letter}" for letter in letters), "run_id"],
            ),
        ],
        about="The newest frame of each run. A click on its name shows the run.",
    )
    for name in ("Since heard of", "Since it moved"):
        panel = panel.override_by_name(name, [property_of("unit", "s"), property_of("decimals", 0)])
    return panel.override_by_name("Run", [property_of("links", [to_run])])


def table_of_alerts() -> table.Panel:
    query = (
        "max by (run_id, rule, family, severity) (tsemon_alert_firing) "
        '* on (run_id) group_left (project, run) max by (run_id, project, run) (tsemon_run_info{project=~"$project"})'
    )
    return rows(
        "Alerts that fire now",
        [now_as_table(query)],
        PROMETHEUS,
        transformations=[
            renamed(
                {},
                without=["Time", "Value", "Value #A"],
                order=["severity", "rule", "family", "project", "run", "run_id"],
            )
        ],
        about="Without those that are silenced in tsemon.",
        height=7,
    )
