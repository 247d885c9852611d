"""The limits that can be set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from tsemon.errors import InvalidArgument

PREFIX = "TSEMON_LIMIT_"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one process of the service. 50 runs of one token at 5 frames a second meet none of them."""

    connections: int = 1000
    """Open connections. One more ends the one that has kept us waiting for longest."""
    head_s: int = 10
    """Seconds in which the head of a request must be complete."""
    body_s: int = 20
    """Seconds in which a body must be complete, and one more for each 16 KiB that came."""
    send_s: int = 30
    """Seconds in which whoever asked must take another 48 KiB of the answer, or what is left of it."""
    requests: int = 512
    """Requests under way."""
    requests_of_one: int = 256
    """Requests under way of one token, or of one address where there are no tokens."""
    strangers: int = 64
    """Requests under way that were let in without a token, where others need one; half of them of one address."""
    stranger_body_s: int = 5
    """Seconds in which the body of such a request must be complete."""
    slow_requests: int = 4
    """Exports and trials of rules under way, half of them of one token or address.

    Each holds a connection to the database, for as long as it takes.
    """
    export_s: int = 600
    """Seconds in which an export must have been taken: until then the database keeps for it what it was."""
    listeners: int = 200
    """Pages and programs that listen to events. Each looks like a request under way for as long as it listens."""
    bytes_held: int = 256 * 2**20
    """Bytes of bodies under way, unpacked, until they are answered."""
    wait_s: int = 5
    """Seconds that a body of frames waits to be stored, by the server's estimate. A trainer's patience is 10 s."""
    commits: int = 256
    """Requests of training processes that wait for a transaction, per thread that writes."""
    writes_per_s: int = 2000
    """What one token may send: a request counts 1, each further frame and each 64 KiB 1 more. Ten seconds' worth at once."""
    reads_per_s: int = 100
    """What one token may ask, in requests. Ten seconds' worth at once."""
    failures_per_s: int = 1
    """Requests of one address that bring no valid token. A minute's worth at once."""
    runs: int = 100_000
    """Runs in the database."""
    project_runs: int = 20_000
    """Runs of one project, so that a token of one does not fill the database for all."""


def limits_from(environment: Mapping[str, str]) -> Limits:
    """Limits from TSEMON_LIMIT_CONNECTIONS and so on. Raises InvalidArgument."""
    known = {PREFIX + field.name.upper(): field.name for field in fields(Limits)}
    given = {name: text for name, text in environment.items() if name.startswith(PREFIX)}
    for name, text in given.items():
        if name not in known:
            raise InvalidArgument(f"no limit {name}; there are {', '.join(known)}")
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:16]) <= 10**12):
            raise InvalidArgument(f"{name} must be a whole number from 1 to 10^12, got {text[:40]!r}")
    return Limits(**{known[name]: int(text) for name, text in given.items()})
