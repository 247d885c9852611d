"""What only a server that shows a folder can tell."""

from __future__ import annotations

from tsemon_answers.runs import ShownSpools
from tsemon_server.access.needs import needs
from tsemon_server.routes.signature import RunId, TheParts, api_router

router = api_router("readers")


@router.get("/runs/{run_id}/spools")
@needs("read", of="run")
def list_spools(run_id: RunId, parts: TheParts) -> ShownSpools:
    """What was read of each spool of a run, and what could not be."""
    assert parts.view is not None  # the route is only there if the server shows a folder
    with parts.store.read() as reader:
        reader.runs.stacks(run_id, 1)  # a run that nobody knows is told as such
    return parts.view.spools_of(run_id)
