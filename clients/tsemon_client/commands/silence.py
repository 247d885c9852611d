"""`tsemon silence` and `tsemon acknowledge`: which alerts send no more messages."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tsemon.errors import InvalidArgument
from tsemon.terminal import Column, examples, moment, print_json, print_table, say
from tsemon_client.commands.completion import complete_project, complete_rule, complete_run
from tsemon_client.commands.finding import find_run
from tsemon_client.commands.listing import check_is_known, duration_of
from tsemon_client.commands.options import ANSWER, DEFAULT_SERVER, AsJson, Server, connect

if TYPE_CHECKING:
    from tsemon_client import Client
    from tsemon_client.models import Alert, Silence

app = typer.Typer()
silences = typer.Typer(help="Silence alerts: no messages about them, for a while.", no_args_is_help=True)
app.add_typer(silences, name="silence", rich_help_panel=ANSWER)

By = Annotated[str | None, typer.Option(help="Name to record.", show_default="your user name")]


@app.command(
    rich_help_panel=ANSWER,
    epilog=examples(
        "tsemon acknowledge 17 --note 'on it'",
        "tsemon acknowledge --incident 4  # all of its firing alerts",
    ),
)
def acknowledge(
    alerts: Annotated[list[str] | None, typer.Argument(metavar="ALERT...", help="Ids of firing alerts.")] = None,
    incident: Annotated[str | None, typer.Option(help="Id of an incident: all of its firing alerts.")] = None,
    note: Annotated[str | None, typer.Option(help="A note for others.")] = None,
    by: By = None,
    as_json: AsJson = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Acknowledge alerts: they stay open, but send no messages. The first acknowledgment of an alert stays."""
    if bool(alerts) == bool(incident):
        raise InvalidArgument(f"expected ids of alerts or --incident, got {'both' if alerts else 'neither'}")
    with connect(server) as client:
        ids = alerts or _firing(client, incident or "")
        found = []
        for each in ids:
            one = client.acknowledge(each, note=note, by=by)
            found.append(one)
            if not as_json:  # now, because the next one may be refused
                what = f"alert {one.alert_id}, {one.rule} in {one.project}/{one.run}"
                say(f"{what}: acknowledged by {one.acknowledged_by}")
    if as_json:
        print_json([one.model_dump(mode="json") for one in found])


def _firing(client: Client, incident: str) -> list[str]:
    """Return the ids of the firing alerts of an incident. Raises InvalidArgument if it has none."""
    of = client.incident(incident)
    alerts: list[Alert] = client.alerts(run_id=of.run_id, state=["firing", "acknowledged"]).all()
    found = [one.alert_id for one in alerts if one.incident_id == incident]
    if not found:
        raise InvalidArgument(f"expected an incident with firing alerts, but incident {incident} has {of.state}")
    return found


@silences.command(
    epilog=examples(
        "tsemon silence add --run vision/vit-80 --rule loss-spike --for 8h --reason 'known bad shard'",
        "tsemon silence add --run 'try-*' --project sweeps --for 2d  # all runs whose name begins with try-",
    )
)
def add(
    duration: Annotated[str, typer.Option("--for", help="How long: 30m, 8h, 2d.")],
    run: Annotated[
        str | None,
        typer.Option(
            help="Only of this run: its name, project/name or id. With * or ?: of all runs with such names.",
            autocompletion=complete_run,
        ),
    ] = None,
    project: Annotated[
        str | None, typer.Option(help="Only of runs of this project.", autocompletion=complete_project)
    ] = None,
    rule: Annotated[str | None, typer.Option(help="Only of this rule.", autocompletion=complete_rule)] = None,
    family: Annotated[str | None, typer.Option(help="Only of this family of rules: tse, entropy, loss, ...")] = None,
    reason: Annotated[str, typer.Option(help="Why.")] = "",
    by: By = None,
    as_json: AsJson = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """Send no messages about alerts that match all of these options. The alerts still open."""
    until = _until(duration)
    if (run, project, rule, family) == (None, None, None, None):
        raise InvalidArgument("expected at least one of --run, --project, --rule and --family, got none")
    with connect(server) as client:
        if run is not None and not re.search(r"[*?]", run):
            found = find_run(client, run)
            if project not in (None, found.project):
                raise InvalidArgument(f"--project is {project!r}, but {run!r} is a run of {found.project!r}")
            run, project = found.run, found.project
        check_is_known(client, rule, family, project)
        silence = client.silence(until=until, rule=rule, run=run, project=project, family=family, reason=reason, by=by)
    if as_json:
        print_json(silence.model_dump(mode="json"))
    else:
        say(f"silence {silence.silence_id}: {_matches(silence)}, until {moment(silence.until)} UTC")


@silences.command("list", epilog=examples("tsemon silence list", "tsemon silence list --project vision --json"))
def list_(
    project: Annotated[
        str | None, typer.Option(help="Only silences of this project.", autocompletion=complete_project)
    ] = None,
    as_json: AsJson = False,
    server: Server = DEFAULT_SERVER,
) -> None:
    """List active silences, the first to end first."""
    with connect(server) as client:
        found = client.silences(project)
    if as_json:
        print_json([one.model_dump(mode="json") for one in found])
    elif not found:
        say("no silences", err=True)
    else:
        columns = [Column("id", right=True), *map(Column, ("silences", "until", "by", "reason"))]
        rows = [[one.silence_id, _matches(one), moment(one.until), one.created_by, one.reason] for one in found]
        print_table(columns, rows)


@silences.command(epilog=examples("tsemon silence end 3"))
def end(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids from `tsemon silence list`.")],
    server: Server = DEFAULT_SERVER,
) -> None:
    """End silences before their time."""
    with connect(server) as client:
        for one in ids:
            client.end_silence(one)
            say(f"silence {one} has ended")


def _until(duration: str) -> datetime:
    """Return the time after this duration. Raises InvalidArgument."""
    try:
        if length := duration_of(duration):
            return datetime.now(UTC) + length
    except OverflowError:
        pass
    raise InvalidArgument(f"--for: expected a duration such as 30m, 8h or 2d, got {duration!r:.80}")


def _matches(silence: Silence) -> str:
    named = (("rule", silence.rule), ("family", silence.family), ("run", silence.run), ("project", silence.project))
    return ", ".join(f"{what} {name}" for what, name in named if name is not None)
