"""`tsemon alerts`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from tsemon.errors import InvalidArgument, one_of
from tsemon.terminal import (
    Cell,
    Column,
    count,
    examples,
    moment,
    print_facts,
    print_heading,
    print_table,
    printable,
    say,
    terminal,
)
from tsemon_client.commands.completion import complete_rule
from tsemon_client.commands.finding import find_run
from tsemon_client.commands.listing import (
    FOUND,
    SEVERITY_STYLES,
    Follow,
    Limit,
    OfProject,
    OfRun,
    Since,
    check_choice,
    check_is_known,
    follow,
    is_printed,
    print_found,
    remark_on_project,
    time_of,
)
from tsemon_client.commands.options import DEFAULT_SERVER, LOOK, AsCsv, AsJson, Server, check_formats, connect

if TYPE_CHECKING:
    from tsemon_client import Client
    from tsemon_client.models import Alert, Incident

app = typer.Typer()

STATE_STYLES = {"firing": "bold red", "pending": "yellow", "acknowledged": "magenta", "resolved": "green"}
SUPERSEDED = "superseded", "yellow"
STATES = ("pending", "firing", "acknowledged", "resolved")


@app.command(
    rich_help_panel=LOOK,
    epilog=examples(
        "tsemon alerts --run vision/vit-80",
        "tsemon alerts --firing --severity critical || page-on-call  # exits 3 when there are any",
        "tsemon alerts --at-end --run vision/vit-80  # after the run; exits 3 when any fired at its end",
        "tsemon alerts --since 2h --json | jq -r '.[].summary'",
        "tsemon alerts 17  # one, with its evidence and what to try",
        "tsemon alerts --follow",
    ),
)
def alerts(
    alert: Annotated[
        str | None,
        typer.Argument(
            metavar="[ALERT]", help="Id of an alert to show, with its evidence; --json adds the window of samples."
        ),
    ] = None,
    run: OfRun = None,
    project: OfProject = None,
    rule: Annotated[str | None, typer.Option(help="Only of this rule.", autocompletion=complete_rule)] = None,
    family: Annotated[str | None, typer.Option(help="Only of this family of rules: tse, entropy, loss, ...")] = None,
    severity: Annotated[
        str | None,
        typer.Option(help="Only info, warning or critical.", autocompletion=lambda: ["info", "warning", "critical"]),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(help="Only pending, firing, acknowledged or resolved.", autocompletion=lambda: [*STATES]),
    ] = None,
    firing: Annotated[
        bool,
        typer.Option(
            "--firing",
            help="Show only firing alerts that are neither silenced nor acknowledged. Exits with 3 if there are any.",
        ),
    ] = False,
    at_end: Annotated[
        bool,
        typer.Option(
            "--at-end",
            help="Show only warnings and critical alerts that were firing when their attempt ended. Exits with 3 if any.",
        ),
    ] = False,
    since: Since = None,
    limit: Limit = 50,
    is_followed: Follow = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """List alerts, the newest first.

    No alert fires in a run that has ended; `fired to the end` marks an alert that
    was firing then. With --firing or --at-end the exit code is 3 if there are any,
    else 0. With --follow and --json each line is a document.
    """
    check_formats(as_json, as_csv)
    if firing and state not in (None, "firing"):
        raise InvalidArgument(f"expected --firing or --state, got both, and --state {state}")
    if firing and at_end:
        raise InvalidArgument("expected --firing or --at-end, got both: nothing fires in a run that has ended")
    if is_followed and as_csv:
        raise InvalidArgument("expected --follow with --json or neither, got --csv")
    filters: dict[str, object] = {"--firing": firing, "--at-end": at_end, "--follow": is_followed, "--run": run}
    filters |= {"--project": project, "--rule": rule, "--family": family, "--severity": severity, "--state": state}
    check_choice("alert", alert, filters | {"--since": since})
    with connect(server) as client:
        if alert is not None:
            _show_one(client.alert(alert), as_json, as_csv)
            return
        from tsemon_client.models import Severity

        of = None if run is None else find_run(client, run)
        asked: dict[str, Any] = {
            "run_id": None if of is None else of.run_id,
            "project": project,
            "rule": rule,
            "family": family,
            "severity": one_of(get_args(Severity), severity, "--severity"),
            "state": "firing" if firing else one_of(STATES, state, "--state"),
            "silenced": False if firing else None,
            "at_end": at_end or None,
            "since": None if since is None else time_of(since),
        }
        check_is_known(client, rule, family, project if of is None else of.project)
        if is_followed:
            is_asked = partial(_is_asked, asked)
            follow(client, client.alerts, asked, limit, "alert_id", is_asked=is_asked, line_of=line_of, as_json=as_json)
            return
        found = list(client.alerts(**asked, limit=limit + 1))
        if not found:
            _remark(client, asked)
    nothing = "nothing fires" if firing else "nothing fired to the end of a run" if at_end else "no alerts"
    print_list = partial(_print_list, has_attempts=of is not None and of.attempt > 1)
    print_found(found, limit, FIELDS, print_list, nothing=nothing, as_json=as_json, as_csv=as_csv)
    if (firing or at_end) and found:
        raise typer.Exit(FOUND)


FIELDS = (
    "alert_id",
    "run_id",
    "project",
    "run",
    "attempt",
    "rule",
    "family",
    "severity",
    "state",
    "pending_step",
    "firing_step",
    "resolved_step",
    "resolved_reason",
    "acknowledged_by",
    "silenced",
    "opened_at",
    "updated_at",
    "summary",
)


def _remark(client: Client, asked: dict[str, Any]) -> None:
    """Say what else may be meant where there is nothing."""
    if not remark_on_project(client, asked["project"]) and asked["state"] == "firing":
        ended = asked | {"state": None, "silenced": None, "at_end": True}
        if next(client.alerts(**ended, limit=1), None) is not None:
            say("runs that have ended are left out; --at-end shows what fired to their end", err=True)


def _print_list(shown: Sequence[Alert], has_attempts: bool) -> None:
    """`has_attempts` is true if the attempts of an alert are shown even if all are of the first one."""
    has_attempts = has_attempts or any(alert.attempt > 1 for alert in shown)
    if terminal() is not None:
        print_alerts(shown, has_attempts)
        return
    names = [
        "id",
        "state",
        "severity",
        "rule",
        "run",
        *(["attempt"] if has_attempts else []),
        "step",
        "changed",
        "summary",
    ]
    columns = [Column(name, right=name in ("id", "attempt", "step")) for name in names]
    print_table(columns, [_cells(alert, has_attempts) for alert in shown])


def print_alerts(alerts: Sequence[Alert], has_attempts: bool = False) -> None:
    """Print two lines or more per alert: a summary has more words than a column has room for."""
    from rich.console import Console
    from rich.text import Text

    console = terminal() or Console(highlight=False, width=1000)
    for alert in alerts:
        state, style = state_of(alert)
        head = Text.assemble(
            (f"{alert.alert_id:>5}  ", "dim"),
            (state, style),
            "  ",
            (alert.severity, SEVERITY_STYLES[alert.severity]),
            "  ",
            (printable(f"{alert.project}/{alert.run}"), "bold"),
            f"  attempt {alert.attempt}" if has_attempts else "",
            f"  step {count(step_of(alert))}",
            (f"  {moment(alert.updated_at)}", "dim"),
        )
        console.print(head, overflow="ellipsis", no_wrap=True)
        print_facts([("", f"{alert.rule}: {alert.summary}")], indent=7, name_width=0)


def _cells(alert: Alert, has_attempt: bool) -> list[Cell]:
    return [
        alert.alert_id,
        state_of(alert),
        (alert.severity, SEVERITY_STYLES[alert.severity]),
        alert.rule,
        f"{alert.project}/{alert.run}",
        *([str(alert.attempt)] if has_attempt else []),
        count(step_of(alert)),
        moment(alert.updated_at),
        alert.summary,
    ]


def state_of(alert: Alert) -> tuple[str, str]:
    if alert.superseded:
        return SUPERSEDED
    did_stand = alert.resolved_reason == "run ended"
    word, style = (
        ("fired to the end" if did_stand else alert.state),
        STATE_STYLES["firing" if did_stand else alert.state],
    )
    return (f"{word}, silenced", "dim") if alert.silenced else (word, style)


def step_of(alert: Alert) -> int:
    """Where it fired, or is about to."""
    return alert.pending_step if alert.firing_step is None else alert.firing_step


def told_step_of(alert: Alert) -> int | None:
    """Where it became what it is: also where it was over, unless that is only the end of its run."""
    is_over = alert.state == "resolved" and alert.resolved_reason != "run ended"
    return alert.resolved_step if is_over else step_of(alert)


def _is_asked(asked: dict[str, Any], alert: Alert) -> bool:
    return asked["state"] in (None, alert.state) and asked["silenced"] in (None, alert.silenced)


def told_of(alert: Alert) -> tuple[str, datetime]:
    return alert.state, alert.updated_at


def line_of(alert: Alert) -> str:
    """The alert as a line of a log."""
    return printable(
        f"{moment(alert.updated_at)}  {state_of(alert)[0]:<16} {alert.severity:<8} {alert.project}/{alert.run}  "
        f"{f'attempt {alert.attempt}  ' if alert.attempt > 1 else ''}step {count(told_step_of(alert))}  {alert.summary}"
    )


def _show_one(alert: Alert, as_json: bool, as_csv: bool) -> None:
    if is_printed(alert, FIELDS, as_json, as_csv):
        return
    print_heading(alert.rule)
    print_facts(_facts(alert))
    # The window of samples is for plots: it is in --json.
    seen = {name: value for name, value in alert.evidence.items() if name != "window"}
    say("")
    print_heading("what the rule saw")
    say("\n".join(f"  {line}" for line in json.dumps(seen, indent=2, ensure_ascii=False).split("\n")))


def _facts(alert: Alert) -> Iterator[tuple[str, Cell]]:
    yield "summary", alert.summary
    if alert.advice.get("text"):
        yield "what to try", advice_of(alert)
    is_over = alert.resolved_reason not in (None, "run ended") and not alert.superseded
    yield "state", f"{alert.state} ({alert.resolved_reason})" if is_over else state_of(alert)
    yield "severity", (alert.severity, SEVERITY_STYLES[alert.severity])
    yield "run", f"{alert.project}/{alert.run}, attempt {alert.attempt}"
    steps = (("pending", alert.pending_step), ("fired", alert.firing_step), ("resolved", alert.resolved_step))
    yield "steps", ", ".join(f"{what} at {step:,}" for what, step in steps if step is not None)
    yield "opened", moment(alert.opened_at)
    yield "changed", moment(alert.updated_at)
    if alert.acknowledged_at:
        note = f": {alert.note}" if alert.note else ""
        yield "acknowledged", f"{moment(alert.acknowledged_at)} by {alert.acknowledged_by}{note}"


def advice_of(one: Alert | Incident) -> str:
    """The advice, with its source in brackets."""
    source = one.advice.get("source")
    return f"{one.advice['text']} ({source})" if source else one.advice["text"]
