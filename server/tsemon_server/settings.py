"""What can be set about the service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tsemon.errors import InvalidArgument

MAX_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the service runs."""

    host: str = "127.0.0.1"
    """The address to listen on. Any but a loopback address needs `insecure`, because there is no login."""
    port: int = 8731
    """The TCP port to listen on; 0 takes any free one."""
    database: str = "sqlite:///tsemon.db"
    """The database URL; a relative path is taken from the working directory."""
    spool: str | None = None
    """A spool folder, as `attach` wrote it, to show read-only in place of a database."""
    workers: int = 1
    """How many processes answer, on one port and one database."""
    notify: str | None = None
    """A YAML file that says who is told of alerts; without one nobody is."""
    insecure: bool = False
    """Whether anyone who reaches the port may read and write everything, from any host name."""


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from TSEMON_HOST, TSEMON_PORT, TSEMON_WORKERS, TSEMON_NOTIFY, and TSEMON_DATABASE or TSEMON_SPOOL."""
    port = environment.get("TSEMON_PORT", str(Settings.port))
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"TSEMON_PORT must be a number from 0 to 65535, got {port!r}")
    if "TSEMON_DATABASE" in environment and "TSEMON_SPOOL" in environment:
        raise InvalidArgument(
            "expected TSEMON_DATABASE or TSEMON_SPOOL, got both; a spool folder is shown without a database, unset one"
        )
    workers = environment.get("TSEMON_WORKERS", str(Settings.workers))
    if not workers.isdecimal() or not 1 <= int(workers) <= MAX_WORKERS:
        raise InvalidArgument(f"TSEMON_WORKERS must be a number from 1 to {MAX_WORKERS}, got {workers!r}")
    return Settings(
        host=environment.get("TSEMON_HOST", Settings.host),
        port=int(port),
        database=environment.get("TSEMON_DATABASE", Settings.database),
        spool=environment.get("TSEMON_SPOOL"),
        workers=int(workers),
        notify=environment.get("TSEMON_NOTIFY"),
    )
