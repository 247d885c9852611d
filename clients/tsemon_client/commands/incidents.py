"""`tsemon incidents`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

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
from tsemon_client.commands.alerts import advice_of
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
    from tsemon_client.models import Incident, IncidentDetail

app = typer.Typer()

STATE_STYLES = {"open": "bold red", "recovered": "green", "ended": "yellow"}
CONSEQUENCE_STYLES = {"firing": "bold red", "superseded": "yellow", "resolved": "green", "ended": "yellow"}
NONE_OPEN = "no open incidents that are neither silenced nor acknowledged"
FIELDS = (
    *("incident_id", "run_id", "project", "run", "attempt", "family", "rule", "severity", "state"),
    *("step", "left_step", "settles_step", "is_settled", "ended_step", "cause_id", "acknowledged", "silenced"),
    *("opened_at", "updated_at", "summary"),
)


@app.command(
    rich_help_panel=LOOK,
    epilog=examples(
        "tsemon incidents --run vision/vit-80",
        "tsemon incidents --open || notify-on-call  # exits 3 when there are any",
        "tsemon incidents --at-end --run vision/vit-80  # after the run; exits 3 if it did not recover",
        "tsemon incidents --since 2h --json | jq -r '.[].summary'",
        "tsemon incidents --follow",
        "tsemon incidents 4  # one, with what to try and what else fired",
    ),
)
def incidents(
    incident: Annotated[
        str | None,
        typer.Argument(metavar="[INCIDENT]", help="Id of an incident to show, with what to try and what else fired."),
    ] = None,
    run: OfRun = None,
    project: OfProject = None,
    rule: Annotated[
        str | None, typer.Option(help="Only with a cause that this rule saw.", autocompletion=complete_rule)
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="Only with a cause of this family: tse, entropy, loss, ...")
    ] = None,
    severity: Annotated[
        str | None, typer.Option(help="Only warning or critical.", autocompletion=lambda: ["warning", "critical"])
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="Only open, recovered or ended.", autocompletion=lambda: [*STATE_STYLES])
    ] = None,
    is_open: Annotated[
        bool,
        typer.Option(
            "--open",
            help="Show only open incidents that are neither silenced nor acknowledged. Exits with 3 if there are any.",
        ),
    ] = False,
    at_end: Annotated[
        bool,
        typer.Option(
            "--at-end",
            help="Show only incidents with an alert that was firing when their attempt ended. Exits with 3 if any.",
        ),
    ] = False,
    since: Since = None,
    limit: Limit = 50,
    is_followed: Follow = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """List incidents, newest first.

    An incident is one failure of a run: the alerts that belong together, and
    the likeliest cause. With --open or --at-end the exit code is 3 if there are
    any, else 0. With --follow and --json each line is a document.
    """
    check_formats(as_json, as_csv)
    if is_open and state is not None:
        raise InvalidArgument(f"expected --open or --state, got both, and --state {state}")
    if at_end and (is_open or state is not None):
        raise InvalidArgument(
            "expected --at-end, --open or --state, got two of them: no incident of an ended run is open"
        )
    if is_followed and as_csv:
        raise InvalidArgument("expected --follow with --json or neither, got --csv")
    filters: dict[str, object] = {"--open": is_open, "--at-end": at_end, "--follow": is_followed, "--run": run}
    filters |= {"--project": project, "--rule": rule, "--family": family, "--severity": severity, "--state": state}
    check_choice("incident", incident, filters | {"--since": since})
    with connect(server) as client:
        if incident is not None:
            _show_one(client.incident(incident), as_json, as_csv)
            return
        of = None if run is None else find_run(client, run)
        check_is_known(client, rule, family, project if of is None else of.project)
        asked: dict[str, Any] = {
            "run_id": None if of is None else of.run_id,
            "project": project,
            "rule": rule,
            "family": family,
            "severity": one_of(("warning", "critical"), severity, "--severity"),
            "state": "open" if is_open else one_of((*STATE_STYLES,), state, "--state"),
            "at_end": at_end or None,
            "since": None if since is None else time_of(since),
        }
        is_asked = partial(_is_asked, asked["state"], is_open)
        if is_followed:
            how: Any = {"is_asked": is_asked, "line_of": line_of, "as_json": as_json}
            follow(client, client.incidents, asked, limit, "incident_id", **how)
            return
        found = list(islice(filter(is_asked, client.incidents(**asked)), limit + 1))
        if not found:
            remark_on_project(client, project)
    nothing = NONE_OPEN if is_open else "no incidents that did not recover" if at_end else "no incidents"
    print_list = partial(print_incidents, has_attempts=of is not None and of.attempt > 1)
    print_found(found, limit, FIELDS, print_list, nothing=nothing, as_json=as_json, as_csv=as_csv)
    if (is_open or at_end) and found:
        raise typer.Exit(FOUND)


def _is_asked(state: str | None, is_unseen: bool, one: Incident) -> bool:
    """`is_unseen`: without silenced and acknowledged ones."""
    return state in (None, one.state) and not (is_unseen and (one.silenced or one.acknowledged))


def line_of(one: Incident) -> str:
    """The incident as a line of a log."""
    cells = _cells(one)
    where = f"  {one.where}" if one.where else ""
    return printable(
        f"{cells['changed']}  {cells['state'][0]:<18} {one.severity:<8} {cells['run']}  "
        f"{f'attempt {one.attempt}  ' if one.attempt > 1 else ''}step {cells['step']}{where}  {one.rule}: {one.summary}"
    )


def print_incidents(incidents: Sequence[Incident], has_attempts: bool = False) -> None:
    """Print a few lines per incident on a terminal, and a row in a pipe.

    `has_attempts` is true if attempts are shown even if all incidents are of the first one.
    """
    has_attempts = has_attempts or any(one.attempt > 1 for one in incidents)
    console = terminal()
    if console is None:
        names = ["id", "state", "severity", "family", "rule", "run", "attempt", "where", "since", "step", "changed"]
        shown = [name for name in names if has_attempts or name != "attempt"] + ["summary", "also fired"]
        columns = [Column(name, right=name in ("id", "attempt", "since", "step")) for name in shown]
        print_table(columns, [[cells[name] for name in shown] for cells in map(_cells, incidents)])
        return
    from rich.text import Text

    for one in incidents:
        cells = _cells(one)
        head = Text.assemble(
            (f"{one.incident_id:>5}  ", "dim"),
            cells["state"],
            "  ",
            cells["severity"],
            "  ",
            (printable(cells["run"]), "bold"),
            f"  attempt {one.attempt}" if has_attempts else "",
            f"  {one.where}" if one.where else "",
            f"  since step {cells['since']}",
            (f"  {moment(one.updated_at)}", "dim"),
        )
        console.print(head, overflow="ellipsis", no_wrap=True)
        print_facts([("", f"{one.rule}: {one.summary}")], indent=7, name_width=0)
        if len(one.alerts) > 1:
            print_facts([("", (f"also fired: {cells['also fired']}", "dim"))], indent=7, name_width=0)


def _cells(one: Incident) -> dict[str, Any]:
    return {
        "id": one.incident_id,
        "state": state_of(one),
        "severity": (one.severity, SEVERITY_STYLES[one.severity]),
        "family": one.family,
        "rule": one.rule,
        "run": f"{one.project}/{one.run}",
        "attempt": str(one.attempt),
        "where": one.where or "-",
        "since": count(one.left_step),
        "step": count(one.step),
        "changed": moment(one.updated_at),
        "summary": one.summary,
        "also fired": ", ".join(one.alerts[1:]) or "-",
    }


def state_of(one: Incident) -> tuple[str, str]:
    if one.state == "open" and (one.silenced or one.acknowledged):
        return f"open, {'silenced' if one.silenced else 'acknowledged'}", "dim" if one.silenced else "magenta"
    return one.state, STATE_STYLES[one.state]


def _show_one(one: IncidentDetail, as_json: bool, as_csv: bool) -> None:
    if is_printed(one, FIELDS, as_json, as_csv):
        return
    print_heading(one.rule)
    print_facts(_facts(one))
    if not one.consequences:
        return
    say("")
    print_heading("also fired")
    columns = [
        Column(name, right=name in ("alert", "fired", "over")) for name in ("alert", "state", "rule", "fired", "over")
    ]
    rows: list[list[Cell]] = [
        [
            each.alert_id,
            (each.state, CONSEQUENCE_STYLES[each.state]),
            each.rule,
            count(each.firing_step),
            count(each.resolved_step),
        ]
        for each in one.consequences
    ]
    print_table(columns, rows)


def _facts(one: IncidentDetail) -> Iterator[tuple[str, Cell]]:
    cells = _cells(one)
    yield "summary", one.summary
    if one.advice.get("text"):
        yield "what to try", advice_of(one)
    yield "state", state_of(one)
    yield "severity", cells["severity"]
    yield "family", one.family
    yield "verdict", "settled" if one.is_settled else f"may still change until step {count(one.settles_step)}"
    yield "run", f"{one.project}/{one.run}, attempt {one.attempt}"
    if one.where:
        yield "where", one.where + ("" if one.head is None else f", head {one.head}")
    yield "sub-step", one.within.text
    for number, sequence in enumerate(one.sequences):
        if number == 0 or sequence.stands_out:
            yield "sequence", sequence.text
    yield "since", f"step {cells['since']}"
    over = "" if one.ended_step is None else f", over at {count(one.ended_step)}"
    yield "steps", f"first alert at {cells['step']}{over}"
    yield "cause", f"alert {one.cause_id}"
    yield "opened", moment(one.opened_at)
    yield "changed", moment(one.updated_at)
