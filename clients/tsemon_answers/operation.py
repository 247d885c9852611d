"""Errors, health, and who is asking."""

from __future__ import annotations

from tsemon_answers.record import Record


class Problem(Record):
    """Why a request was not carried out."""

    error: str
    """A word for programs, the same for the same kind of problem."""
    detail: str
    """A sentence for people: what was expected, what came, what to do next."""


class Health(Record):
    """The server can do its work."""

    status: str
    """Always `ok`; the HTTP status tells of trouble."""


class Session(Record):
    """Who is asking, as far as the server knows."""

    needs_token: bool
    """True if this server requires a token for everything except the web UI's files and its own health."""
    scopes: list[str]
    """Scopes of the token of this request: `ingest`, `read`, `metrics`, or `admin` for everything; empty without a token."""
    project: str | None
    """The only project that the token is for; null for all projects."""
    name: str | None
    """Name that was given to the token."""
