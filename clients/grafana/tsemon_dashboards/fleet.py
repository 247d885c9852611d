"""All runs at a glance: which are there, how they do, which incidents are open. Needs Prometheus alone."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Panel

from tsemon_dashboards.panels import (
    DECADES,
    GREEN,
    dashboard,
    figure,
    labels,
    lines,
    property_of,
    renamed,
    rows,
    transformation,
    with_healthy_range,
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
        "Open incidents",
        now(f"sum({named(INCIDENTS)}) or vector(0)"),
        bad_from=1,
        about="An incident groups the alerts of one failure. tsemon's own rules evaluate every frame.",
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
    yield table_of_incidents()
    diversity = lines(
        "Token diversity, lowest of the layers",
        over_time(named("tsemon_layers_token_diversity_min"), NAME),
        about=f"{GREEN} At 1e-6, the tokens of a layer differ in a millionth of their energy.",
    )
    yield with_healthy_range(diversity, "token_diversity").scale_distribution(DECADES)
    yield lines("Loss", over_time(named("tsemon_run_loss"), NAME))
    yield lines(
        "Steps per second",
        over_time(named("clamp_min(deriv(tsemon_run_process_step[5m]), 0)"), NAME),
        about="Where the process is, by its heartbeats: 0 is a run that is stuck.",
    )
    yield lines(
        "Open incidents, by family of the cause",
        over_time(f"sum by (family) ({INCIDENTS_OF_PROJECT})", "{{family}}"),
        about="tse: token similarity. entropy, rank, norm, dead, diverge, data, loss, liveness.",
    ).min(0)


EACH_INCIDENT = "max by (run_id, incident_id, rule, family, severity, blocks) (tsemon_incident)"
"""Once, however many servers report it."""
INCIDENTS = "sum by (run_id) (max by (run_id, incident_id) (tsemon_incident))"
"""The number of open incidents of each run. Two servers may report different severities for a moment."""
INCIDENTS_OF_PROJECT = (
    f"{EACH_INCIDENT} "
    '* on (run_id) group_left (project, run) max by (run_id, project, run) (tsemon_run_info{project=~"$project"})'
)
TO_RUN = {"title": "Show the run", "url": "/d/tsemon-run?var-run=${__data.fields.run_id}"}
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
    return panel.override_by_name("Run", [property_of("links", [TO_RUN])])


def table_of_incidents() -> table.Panel:
    return rows(
        "Incidents that are open now",
        [now_as_table(INCIDENTS_OF_PROJECT)],
        PROMETHEUS,
        transformations=[
            renamed(
                {},
                without=["Time", "Value", "Value #A"],
                order=["severity", "rule", "family", "blocks", "project", "run", "run_id", "incident_id"],
            )
        ],
        about="With the rule and family of the likeliest cause. Incidents that are silenced in tsemon are left out.",
        height=7,
    ).override_by_name("run", [property_of("links", [TO_RUN])])
