"""Options that several commands of the service have."""

from __future__ import annotations

from typing import Annotated

import typer

AnyDatabase = Annotated[
    str | None, typer.Option("--database", help="Database URL (TSEMON_DATABASE, default sqlite:///tsemon.db).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


def url_of(database: str | None) -> str:
    """What --database names, or else the environment."""
    from tsemon_server.settings import settings_from_environment

    return settings_from_environment().database if database is None else database
