"""What the commands that ask a service have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tsemon.errors import InvalidArgument, MissingPackage

if TYPE_CHECKING:
    from tsemon_client import Client


LOOK, ANSWER = "Look", "Answer alerts"
"""Where the help shows these commands."""
DEFAULT_SERVER = "http://127.0.0.1:8731"

Server = Annotated[
    str,
    typer.Option(
        "--server", envvar="TSEMON_SERVER", help="Base URL of the server; TSEMON_TOKEN is the token, if it needs one."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document with all fields.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Comma-separated values, with a header line.")]


def connect(server: str, *, retries: int = 3) -> Client:
    try:
        from tsemon_client import Client
    except ModuleNotFoundError as error:
        raise MissingPackage(f"this command needs {error.name}; pip install 'tsemon[client]'") from None
    return Client(server, retries=retries)


def check_formats(as_json: bool, as_csv: bool) -> None:
    if as_json and as_csv:
        raise InvalidArgument("expected --json or --csv, got both")
