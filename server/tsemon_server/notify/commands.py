"""`tsemon notify`: tries receivers, and shows what they were sent. What a command needs is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tsemon_server.notify.messages import Message
    from tsemon_server.store import Notification

app = typer.Typer(help="Tell people and programs of alerts.", no_args_is_help=True)


@app.command("test")
def try_out(
    config: Annotated[
        Path, typer.Option("--config", envvar="TSEMON_NOTIFY", help="The file that `serve --notify` takes.")
    ],
    receiver: Annotated[str | None, typer.Argument(help="The receiver to try; without, all are.")] = None,
) -> None:
    """Send a message that says it is a test, and tell what came back. Exits 1 where one did not get through."""
    from tsemon.errors import InvalidArgument
    from tsemon_server.notify.channels import send
    from tsemon_server.notify.configuration import load
    from tsemon_server.notify.sending import NotDelivered

    configuration = load(config)
    tried = [known for known in configuration.receivers if receiver in (None, known.name)]
    if not tried:
        names = ", ".join(known.name for known in configuration.receivers)
        raise InvalidArgument(f"expected one of the receivers {names}, got {receiver!r}")
    num_failed = 0
    for known in tried:
        try:
            typer.echo(f"{known.name}: {send(_test_message(configuration.base_url), known)}")
        except NotDelivered as error:
            num_failed += 1
            typer.echo(f"{known.name}: not delivered: {error}")
    if num_failed:
        raise typer.Exit(1)


@app.command("log")
def show_log(
    receiver: Annotated[str | None, typer.Option(help="Only of this receiver.")] = None,
    limit: Annotated[int, typer.Option(help="The last so many.", min=1, max=1000)] = 50,
    json: Annotated[bool, typer.Option("--json", help="A JSON object per line, with all that is known.")] = False,
    database: Annotated[
        str | None, typer.Option("--database", help="Database URL (TSEMON_DATABASE, default sqlite:///tsemon.db).")
    ] = None,
) -> None:
    """Show what was sent to whom, the newest last."""
    from tsemon_server.settings import settings_from_environment
    from tsemon_server.store import Store

    store = Store(settings_from_environment().database if database is None else database, migrate=False)
    try:
        for found in reversed(store.notices.log(receiver=receiver, limit=limit)):
            typer.echo(found.model_dump_json() if json else _line_of(found))
    finally:
        store.close()


def _line_of(found: Notification) -> str:
    time = found.sent_at or found.created_at
    about = f"{found.rule} {found.kind} {found.project}/{found.run}"
    tries = f" after {found.attempts} attempts" if found.attempts > 1 else ""
    return f"{time:%Y-%m-%d %H:%M:%S} {found.receiver}: {found.status}{tries}: {about}" + (
        f" ({found.error})" if found.error else ""
    )


def _test_message(base_url: str | None) -> Message:
    from datetime import UTC, datetime

    from tsemon_server.notify.messages import Message, Notice
    from tsemon_server.store import Alert

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
