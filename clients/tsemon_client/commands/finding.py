"""Which run is meant."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from tsemon.errors import InvalidArgument, ServerRefused, UnknownRun

if TYPE_CHECKING:
    from tsemon_client import Client
    from tsemon_client.models import Run

MAX_NAMES = 1000
"""Of so many runs the names are looked through for one that is alike."""
MAX_SHOWN = 5


def find_run(client: Client, text: str) -> Run:
    """The run of this project/name, name or id. Raises UnknownRun, which names those that may be meant."""
    found: list[Run] = []
    # Both may have a slash in them. A run whose name is the project/name of another one has a project/name, too.
    for index in (index for index, char in enumerate(text) if char == "/"):
        found += client.runs(project=text[:index], run=text[index + 1 :], limit=1)
    found = found or list(client.runs(run=text, limit=MAX_SHOWN + 1))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{run.project}/{run.run}" for run in found[:MAX_SHOWN])
        more = ", ..." if len(found) > MAX_SHOWN else ""
        raise UnknownRun(f"expected one run named {text!r}, but there are several: {names}{more}; say which")
    return _run_of_id(client, text) or _refuse(client, text)


def _run_of_id(client: Client, text: str) -> Run | None:
    try:
        return client.run(text)
    except (UnknownRun, InvalidArgument, ServerRefused):  # or it looks like no id, or like another route
        return None


def _refuse(client: Client, text: str) -> Run:
    known = [f"{run.project}/{run.run}" for run in client.runs(limit=MAX_NAMES)]
    by_name = {name.partition("/")[2]: name for name in reversed(known)}
    close = [by_name.get(name, name) for name in difflib.get_close_matches(text, [*by_name, *known], n=MAX_SHOWN)]
    if close:
        hint = f"did you mean {' or '.join(dict.fromkeys(close))}?"
    else:
        hint = f"the latest are {', '.join(known[:MAX_SHOWN])}" if known else "the service has no runs yet"
    raise UnknownRun(f"no run has the name or id {text!r}; {hint}")
