"""`tsemon runs`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from tsemon.errors import InvalidArgument, ServerRefused, one_of
from tsemon.terminal import (
    Cell,
    Column,
    ago,
    count,
    examples,
    moment,
    number,
    print_csv,
    print_facts,
    print_heading,
    print_json,
    print_table,
    say,
    terminal,
)
from tsemon_client.commands.alerts import print_alerts
from tsemon_client.commands.completion import complete_project, complete_run, complete_tag
from tsemon_client.commands.drawing import NOT_FINITE, bars_for, fitted, sparkline
from tsemon_client.commands.finding import find_run
from tsemon_client.commands.incidents import print_incidents
from tsemon_client.commands.listing import SEVERITY_STYLES
from tsemon_client.commands.options import DEFAULT_SERVER, LOOK, AsCsv, AsJson, Server, check_formats, connect

if TYPE_CHECKING:
    from tsemon.wire import AlertState
    from tsemon_client import Client
    from tsemon_client.models import Glance, Incident, Run, RunDetail

app = typer.Typer()

STYLES = {"running": "green", "silent": "yellow", "stuck": "yellow", "finished": "dim", "failed": "red"}
OPEN: tuple[AlertState, ...] = ("acknowledged", "pending", "firing")
"""An alert that is not over. An older service reads the last of several states alone."""
CURVE_WIDTH = 16
NAME_WIDTH = 28
MAX_GLANCES = 100
"""Runs in one question for glances."""
MAX_INCIDENTS = 1000
"""Newest incidents that are read for the list."""


@app.command(
    rich_help_panel=LOOK,
    epilog=examples(
        "tsemon runs",
        "tsemon runs --project vision --condition running --order loss",
        "tsemon runs --match vit --tag sweep-7 --limit 200",
        "tsemon runs vision/vit-80  # all about one run",
        "tsemon runs --condition stuck --json | jq -r '.[].run'",
    ),
)
def runs(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Show all about this run: name, project/name or id.", autocompletion=complete_run
        ),
    ] = None,
    project: Annotated[str | None, typer.Option(help="Only of this project.", autocompletion=complete_project)] = None,
    match: Annotated[
        str | None, typer.Option("--match", "-m", help="Only with this in name, project or a tag, in any case.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Only with this tag. Repeatable: with all.", autocompletion=complete_tag)
    ] = None,
    condition: Annotated[
        str | None,
        typer.Option(
            help="Only running, silent, stuck, finished or failed.",
            autocompletion=lambda: ["running", "silent", "stuck", "finished", "failed"],
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="Only with this state, as the training process last reported it: running, finished or failed.",
            autocompletion=lambda: ["running", "finished", "failed"],
        ),
    ] = None,
    order: Annotated[
        str,
        typer.Option(
            help="updated, created, name, step, loss or alerts, descending with a - in front; or live: running runs first.",
            autocompletion=lambda: ["live", *(f"{sign}{word}" for word in ORDER_WORDS for sign in ("", "-"))],
        ),
    ] = "-updated",
    limit: Annotated[int, typer.Option("--limit", "-n", help="Maximum number of runs.", min=1)] = 50,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """List the runs of a server, or show one with its config, newest numbers, incidents and alerts.

    A run is running, silent (no heartbeat), stuck (heartbeats, but no new steps),
    finished or failed. On a terminal, `of late` shows the loss, and `worst layer`
    a value of the newest sample: one that is not finite, or the one nearest to a
    threshold. `incident` is the cause of an incident that is open or lasted until
    the run ended.
    """
    check_formats(as_json, as_csv)
    with connect(server) as client:
        if run is not None:
            if any((project, match, tag, condition, state)):
                raise InvalidArgument("expected a run or filters, got both; project/name says which of several runs")
            _show_one(client, run, as_json, as_csv)
            return
        from tsemon.wire import RunState
        from tsemon_client.models import Condition, RunOrder

        asked = client.runs(
            project=project,
            q=match,
            tags=tag or (),
            condition=one_of(get_args(Condition), condition, "--condition"),
            state=one_of(get_args(RunState), state, "--state"),
            order=one_of(get_args(RunOrder), order, "--order") or "-updated",
            limit=limit + 1,
        )
        found = list(asked)
        shown = found[:limit]
        if as_json:
            print_json([one.model_dump(mode="json") for one in shown])
        elif as_csv:
            _print_csv(shown)
        elif not found:
            say("no runs" if not any((project, match, tag, condition, state)) else "no runs match", err=True)
        else:
            _print_list(client, shown)
            if len(found) > limit:
                say(f"there are more than these {limit:,}; --limit shows more, --match and --project fewer", err=True)


ORDER_WORDS = ("updated", "created", "name", "step", "loss", "alerts")
FIELDS = (
    "run_id",
    "project",
    "run",
    "condition",
    "state",
    "attempt",
    "num_blocks",
    "last_step",
    "process_step",
    "num_frames",
    "loss",
    "open_alerts",
    "alerts_at_end",
    "created_at",
    "updated_at",
    "tags",
)


def _print_csv(shown: Sequence[Run]) -> None:
    # A tag may have any character in it.
    rows = ([record[name] for name in FIELDS[:-1]] + [json.dumps(record["tags"])] for record in map(_json, shown))
    print_csv(FIELDS, rows)


def _json(run: Run) -> dict[str, Any]:
    return run.model_dump(mode="json")


def _print_list(client: Client, shown: Sequence[Run]) -> None:
    console = terminal()
    now = datetime.now(UTC)
    # A loss that is not finite is told by the course of the losses.
    glances = _glances(client, shown if console else [run for run in shown if run.loss is None and run.num_frames])
    incidents = _incidents(client, shown)
    columns = [
        Column("condition"),
        Column("run", flexible=True),
        Column("step", right=True),
        Column("loss", right=True),
        Column("incident"),
        Column("heard of", right=True),
        Column("id", spare=True),
    ]
    rows: list[list[Cell]] = [
        [
            _condition(run),
            f"{run.project}/{run.run}",
            str(run.last_step) if console is None and run.last_step is not None else count(run.last_step),
            _loss(run, glances),
            _incident(run, incidents.get(run.run_id, [])),
            ago(run.updated_at, now) if console else moment(run.updated_at),
            (run.run_id, "dim"),
        ]
        for run in shown
    ]
    if console:
        bars = bars_for(console)
        columns[4:4] = [Column(f"{'of late':<{CURVE_WIDTH}}", spare=True), Column("worst layer", spare=True)]
        for run, row in zip(shown, rows, strict=True):
            row[4:4] = _at_a_glance(glances.get(run.run_id), bars)
    print_table(columns, rows)


def _loss(run: Run, glances: Mapping[str, Glance]) -> Cell:
    glance = glances.get(run.run_id)
    is_finite = glance is None or glance.loss is None or glance.loss.mean[-1:] != [None]
    return number(run.loss) if is_finite else ("not finite", "bold red")


def _incidents(client: Client, shown: Sequence[Run]) -> dict[str, list[Incident]]:
    """By run: the incidents that are open or lasted until its end, worst first. An older server has none."""
    found: dict[str, list[Incident]] = defaultdict(list)
    if any(run.open_alerts or run.alerts_at_end for run in shown):
        with suppress(ServerRefused):
            for incident in (
                *client.incidents(state="open", limit=MAX_INCIDENTS),
                *client.incidents(at_end=True, limit=MAX_INCIDENTS),
            ):
                found[incident.run_id].append(incident)
    order = [*SEVERITY_STYLES]
    return {run_id: sorted(those, key=lambda one: order.index(one.severity)) for run_id, those in found.items()}


def _incident(run: Run, incidents: Sequence[Incident]) -> Cell:
    if incidents:
        more = f" and {len(incidents) - 1} more" if incidents[1:] else ""
        return incidents[0].rule + more, SEVERITY_STYLES[incidents[0].severity]
    return ("none", "dim") if not run.open_alerts else f"{run.open_alerts} alert{'s' * (run.open_alerts > 1)}"


def _condition(run: Run) -> tuple[str, str]:
    condition = run.condition or run.state
    return condition, STYLES[condition]


def _glances(client: Client, shown: Sequence[Run]) -> dict[str, Glance]:
    """By run. An older service has none."""
    found: dict[str, Glance] = {}
    with suppress(ServerRefused):
        for start in range(0, len(shown), MAX_GLANCES):
            run_ids = [run.run_id for run in shown[start : start + MAX_GLANCES]]
            found |= {glance.run_id: glance for glance in client.glances(run_ids, points=2 * CURVE_WIDTH)}
    return found


def _at_a_glance(glance: Glance | None, bars: str) -> list[Cell]:
    curve = glance.loss.mean if glance and glance.loss else []
    worst = glance.worst if glance else None
    return [
        (sparkline(fitted(curve, CURVE_WIDTH), bars=bars, gap=NOT_FINITE), "cyan"),
        "-"
        if worst is None
        else (f"{worst.label or worst.layer}: not finite", "bold red")
        if worst.metric in ("nonfinite", "nonfinite_entries")  # the value is how much is not
        else (f"{worst.label or worst.layer}: {worst.metric} is not finite", "bold red")
        if worst.value is None
        else f"{worst.label or worst.layer}: {worst.metric} {worst.value:.4g}",
    ]


def _show_one(client: Client, name: str, as_json: bool, as_csv: bool) -> None:
    run = client.run(find_run(client, name).run_id)
    if as_json:
        print_json(_json(run))
        return
    if as_csv:
        _print_csv([run])
        return
    for title, facts in _about(run):
        print_heading(title)
        print_facts(facts, name_width=NAME_WIDTH)
        say("")
    with suppress(ServerRefused):  # an older server has none
        incidents = client.incidents(run_id=run.run_id, attempt=run.attempt).all()
        if incidents:
            print_heading("incidents")
            print_incidents(incidents, has_attempts=run.attempt > 1)
            say("")
    alerts = client.alerts(run_id=run.run_id, state=OPEN).all()
    alerts += client.alerts(run_id=run.run_id, at_end=True).all() if run.alerts_at_end else []
    if alerts:
        print_heading("alerts")
        print_alerts(alerts, has_attempts=run.attempt > 1)


def _about(run: RunDetail) -> Iterator[tuple[str, list[tuple[str, Cell]]]]:
    now = datetime.now(UTC)
    yield (
        f"{run.project}/{run.run}",
        [
            ("id", run.run_id),
            ("condition", _condition(run)),
            ("step", f"{count(run.last_step)} recorded, {count(run.process_step)} heard of"),
            ("loss", _scalar(run.loss) if run.latest and "loss" in run.latest.scalars else number(run.loss)),
            ("alerts", f"{run.open_alerts} open" + (f", {run.alerts_at_end} at the end" if run.alerts_at_end else "")),
            ("begun", moment(run.created_at)),
            ("heard of", f"{moment(run.updated_at)} ({ago(run.updated_at, now)} ago)"),
            ("frames", count(run.num_frames)),
            ("blocks", _blocks(run)),
            ("tags", ", ".join(run.tags) or "-"),
        ],
    )
    if len(run.attempts) > 1:
        yield (
            "attempts",
            [
                (str(one.attempt), f"from step {count(one.resume_step or 0)}, {moment(one.started_at)}")
                for one in run.attempts
            ],
        )
    if run.latest:
        yield f"at step {run.latest.step:,}", [(name, _scalar(value)) for name, value in run.latest.scalars.items()]
    if run.metrics.layers:
        yield "by layer", [(name, f"{num} layers") for name, num in run.metrics.layers.items()]
    if run.metrics.heads:
        yield "by head", [(name, f"{num} blocks, {heads} heads") for name, (num, heads) in run.metrics.heads.items()]
    if run.not_measured:
        yield "not measured", list(_each_reason_once(run.not_measured))
    if run.config:
        yield "config", list(_flat(run.config))


def _each_reason_once(not_measured: dict[str, str]) -> Iterator[tuple[str, Cell]]:
    metrics: dict[str, list[str]] = {}
    for metric, reason in not_measured.items():
        metrics.setdefault(reason, []).append(metric)
    for reason, (first, *others) in metrics.items():
        yield first, reason
        yield from ((other, "same reason") for other in others)


def _scalar(value: float | None) -> Cell:
    """That was recorded."""
    return ("not finite", "bold red") if value is None else number(value)


def _blocks(run: RunDetail) -> str:
    if not run.blocks:
        return "-"
    ends = run.blocks[0] if len(run.blocks) == 1 else f"{run.blocks[0]} to {run.blocks[-1]}"
    stacks = f" in {len(run.stacks)} stacks, {run.depth}" if len(run.stacks) > 1 else ""
    return f"{len(run.blocks)}{stacks}: {ends}"


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Cell]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
