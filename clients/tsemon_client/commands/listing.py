"""Options, filters and output that `tsemon alerts` and `tsemon incidents` share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tsemon.errors import UNANSWERED, InvalidArgument
from tsemon.terminal import print_csv, print_json, print_json_line, say
from tsemon_client.commands.completion import complete_project, complete_run
from tsemon_client.commands.listening import looks

if TYPE_CHECKING:
    from tsemon_client import Client
    from tsemon_client.models import Alert, Incident

R = TypeVar("R", bound="Alert | Incident")

FOUND = 3
"""The exit code that says: something fires."""
OVERLAP = timedelta(seconds=60)
"""A change may be seen only later than others of the same time."""
SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim"}
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

OfRun = Annotated[
    str | None,
    typer.Option("--run", help="Only of this run: its name, project/name, or id.", autocompletion=complete_run),
]
OfProject = Annotated[
    str | None, typer.Option("--project", help="Only of this project.", autocompletion=complete_project)
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since", help="Only if changed in the last 30m, 2h, 7d, or since a time, by default in UTC: 2026-01-31T12:00."
    ),
]
Limit = Annotated[int, typer.Option("--limit", "-n", help="Maximum number, the newest first.", min=1)]
Follow = Annotated[
    bool,
    typer.Option("--follow", "-f", help="Keep running and print a line for each change; retry if the server is away."),
]


def check_choice(what: str, one: str | None, filters: Mapping[str, object]) -> None:
    """Raise InvalidArgument for an id of `what` beside a filter, and for an id that is no number."""
    for option, given in filters.items():
        if one is not None and given:
            raise InvalidArgument(f"expected an {what.upper()} or {option}, got both")
    if one is not None and not one.isdecimal():
        raise InvalidArgument(
            f"expected the id of an {what}, a number, got {one!r:.80}; --run lists the {what}s of a run"
        )


def check_is_known(client: Client, rule: str | None, family: str | None, project: str | None) -> None:
    """Raises InvalidArgument for names that neither a rule has nor an alert: of those there will never be one."""
    if rule is None and family is None:
        return
    from tsemon.catalogue import nearest

    rules = client.rules(project)
    for word, given, known, alerts in (
        ("rule", rule, {one.name for one in rules}, client.alerts(rule=rule, limit=1)),
        ("family", family, {one.family for one in rules}, client.alerts(family=family, limit=1)),
    ):
        if given is not None and given not in known and next(alerts, None) is None:
            raise InvalidArgument(f"--{word}: no {word} is named {given!r:.80}; {nearest(given, known)}")


def remark_on_project(client: Client, project: str | None) -> bool:
    """Warn if the project has no runs. True if it has none."""
    has_none = project is not None and next(client.runs(project=project, limit=1), None) is None
    if has_none:
        say(f"the service has no runs of project {project!r}", err=True)
    return has_none


def duration_of(text: str) -> timedelta | None:
    """Return how long `30m`, `2h` or `7d` is; None for other texts."""
    found = re.fullmatch(r"(\d{1,6}) ?([smhdw])", text.strip())
    return timedelta(**{UNITS[found[2]]: int(found[1])}) if found else None


def time_of(text: str) -> str:
    """An ISO time with its zone. `30m` is so long ago; a time without a zone is UTC. Raises InvalidArgument."""
    try:
        if (ago := duration_of(text)) is not None:
            return (datetime.now(UTC) - ago).isoformat()
        time = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError):
        raise InvalidArgument(
            "--since takes 30m, 2h, 7d or a time such as 2026-01-31T12:00:00Z, in the years 1 to 9999, "
            f"got {text!r:.80}"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).isoformat()


def print_found(
    found: Sequence[R],
    limit: int,
    fields: Sequence[str],
    print_list: Callable[[Sequence[R]], None],
    *,
    nothing: str,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Print at most `limit`. `nothing` is the text for people if there is none."""
    shown = found[:limit]
    records = [one.model_dump(mode="json") for one in shown]
    if as_json:
        print_json(records)
    elif as_csv:
        print_csv(fields, [[record[name] for name in fields] for record in records])
    elif not found:
        say(nothing, err=True)
    else:
        print_list(shown)
        if len(found) > limit:
            say(f"there are more than these {limit:,}; --limit shows more", err=True)


def is_printed(one: Alert | Incident, fields: Sequence[str], as_json: bool, as_csv: bool) -> bool:
    """Print it if it is asked for as JSON or CSV."""
    record = one.model_dump(mode="json")
    if as_json:
        print_json(record)
    elif as_csv:
        print_csv(fields, [[record[name] for name in fields]])
    return as_json or as_csv


def follow(
    client: Client,
    find: Callable[..., Iterable[R]],
    asked: dict[str, Any],
    limit: int,
    id_name: str,
    *,
    is_asked: Callable[[R], bool],
    line_of: Callable[[R], str],
    as_json: bool,
) -> None:
    """Until it is interrupted: each one as it is now, then each change of one, the oldest first."""
    told: dict[str, tuple[str, datetime]] = {}
    newest: datetime | None = None
    """Time of the newest change, by the clock of the server."""

    def read(**asked: Any) -> None:
        nonlocal newest
        for one in [*find(**asked)][::-1]:
            newest = max(one.updated_at, newest or one.updated_at)
            key, state = getattr(one, id_name), (one.state, one.updated_at)
            if told.get(key) != state and (key in told or is_asked(one)):
                told[key] = state
                print_json_line(one.model_dump(mode="json")) if as_json else print(line_of(one), flush=True)

    with suppress(KeyboardInterrupt):
        read(**asked, limit=limit)
        is_away = False
        for _ in looks(client, [asked["run_id"]] if asked["run_id"] else []):
            # All states, because one that was printed as firing is printed again when it is over.
            changed = {"state": None, "silenced": None, "since": newest - OVERLAP} if newest else {}
            try:
                read(**{name: (asked | changed)[name] for name in asked})
            except UNANSWERED as error:
                if not is_away:
                    say(f"tsemon: {error}; it is asked again until it answers", err=True)
                is_away = True
            else:
                is_away = False
