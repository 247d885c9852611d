"""Names of runs that live processes have."""

from __future__ import annotations

from collections.abc import Callable

from tsemon.errors import NameInUse, ServerUnreachable
from tsemon.transport.http import HttpDelivery


def check_name(delivery: HttpDelivery, project: str, run: str, warn: Callable[[str], None]) -> None:
    """Raise NameInUse if a live process sends to the run of this name. Warns if the server does not answer."""
    try:
        found = delivery.find(project, run)
        attempts = [] if found is None else delivery.run(found["run_id"])["attempts"]
    except ServerUnreachable as error:
        warn(f"{error}; whether a live process already has the name {run!r} is checked when the run is registered")
        return
    finally:
        delivery.close()
    if live := [attempt["attempt"] for attempt in attempts if attempt.get("is_live")]:
        raise NameInUse(
            f"a live process sends to the run {run!r} of project {project!r} (attempt {live[-1]}); give another name, end "
            'that process, or attach with on_conflict="new" or "take_over". A process that was killed counts as live for '
            "95 s"
        )
