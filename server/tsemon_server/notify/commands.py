"""`tsemon notify`: tries receivers, and shows what they were sent. What a command needs is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tsemon.terminal import examples, print_json, say
from tsemon_server.options import AnyDatabase, url_of

if TYPE_CHECKING:
    from tsemon_answers.alerts import Notification
    from tsemon_server.notify.messages import Message

app = typer.Typer(help="Tell people and programs of alerts.", no_args_is_help=True)


@app.command(
    "test",
    epilog=examples(
        "tsemon notify test --config notify.yaml",
        "tsemon notify test pager --config notify.yaml",
        "tsemon notify test --config notify.yaml --json | jq '.[] | select(.delivered | not)'",
    ),
)
def try_out(
    config: Annotated[
        Path, typer.Option("--config", envvar="TSEMON_NOTIFY", help="The file that `serve --notify` takes.")
    ],
    receiver: Annotated[str | None, typer.Argument(help="The receiver to try (default: all of them).")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print `receiver`, `delivered` and `told` (the response) as JSON.")
    ] = False,
) -> None:
    """Send a test message and print the response. Exits with 1 if a message was not delivered."""
    from tsemon.errors import InvalidArgument
    from tsemon_server.notify.channels import send
    from tsemon_server.notify.configuration import load
    from tsemon_server.notify.sending import NotDelivered

    configuration = load(config)
    tried = [known for known in configuration.receivers if receiver in (None, known.name)]
    if not tried:
        names = ", ".join(known.name for known in configuration.receivers)
        raise InvalidArgument(f"expected one of the receivers {names}, got {receiver!r}")
    outcomes: list[dict[str, str | bool]] = []
    for known in tried:
        try:
            told, is_delivered = send(_test_message(configuration.base_url), known).told, True
        except NotDelivered as error:
            told, is_delivered = str(error), False
        outcomes.append({"receiver": known.name, "delivered": is_delivered, "told": told})
        if not as_json:  # each as it comes: a receiver may take a while
            say(f"{known.name}: {'' if is_delivered else 'not delivered: '}{told}")
    if as_json:
        print_json(outcomes)
    if not all(outcome["delivered"] for outcome in outcomes):
        raise typer.Exit(1)


@app.command(
    "log",
    epilog=examples(
        "tsemon notify log --limit 10",
        "tsemon notify log --json | jq '.[] | select(.status == \"failed\")'",
    ),
)
def show_log(
    receiver: Annotated[str | None, typer.Option(help="Only of this receiver.")] = None,
    limit: Annotated[int, typer.Option(help="Maximum number, the newest ones.", min=1, max=1000)] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print all fields as JSON.")] = False,
    database: AnyDatabase = None,
) -> None:
    """List the messages to receivers, the newest last."""
    from tsemon_server.store import Store

    store = Store(url_of(database), migrate=False)
    try:
        log = [*reversed(store.notices.log(receiver=receiver, limit=limit))]
    finally:
        store.close()
    if as_json:
        print_json([found.model_dump(mode="json") for found in log])
    for found in log if not as_json else ():
        say(_line_of(found))


def _line_of(found: Notification) -> str:
    time = found.sent_at or found.created_at
    about = f"{found.rule} {found.kind} {found.project}/{found.run}"
    tries = f" after {found.attempts} attempts" if found.attempts > 1 else ""
    return f"{time:%Y-%m-%d %H:%M:%S} {found.receiver}: {found.status}{tries}: {about}" + (
        f" ({found.error})" if found.error else ""
    )


def _test_message(base_url: str | None) -> Message:
    from datetime import UTC, datetime

    from tsemon_answers.alerts import Alert
    from tsemon_server.notify.messages import Message, Notice

    now = datetime.now(UTC)
    alert = Alert(
        alert_id="0",
        run_id="test",
        project="test",
        run="test",
        attempt=1,
        rule="notify-test",
        family="test",
        severity="info",
        state="firing",
        pending_step=0,
        firing_step=0,
        resolved_step=None,
        summary="a test by `tsemon notify test`: nothing is wrong",
        evidence={},
        advice={},
        opened_at=now,
        updated_at=now,
    )
    return Message([Notice("firing", alert)], base_url, now)
