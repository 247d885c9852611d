"""Shows the spools under a folder as runs, without changing the folder.

What they hold goes the way of frames that are sent: through the same checks and rules, into a database, which lies in a
private temporary folder. It is an index and no import: nothing of it outlives the service.
"""

from __future__ import annotations

from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from tsemon.errors import SpoolError
from tsemon.wire import API
from tsemon_answers.runs import ShownSpools
from tsemon_server.alerts import Watch
from tsemon_server.errors import problem_response
from tsemon_server.spools.following import Follower
from tsemon_server.spools.scratch import Scratch

__all__ = ["ReadOnly", "SpoolView"]


class SpoolView:
    """All spools under `root`. Their index is at `database`, and filled from `start` to `close`."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise SpoolError(f"expected a spool folder, as attach() wrote it, but {root} is not there or is no folder")
        self._scratch = Scratch()
        self.database = f"sqlite:///{self._scratch.path / 'index.db'}"
        self._follower = Follower(self.root, self.database)

    def start(self, watch: Watch) -> None:
        """Follow the folder in a thread; `watch` lets the rules read the new frames."""
        self._follower.start(watch)

    def close(self) -> None:
        """Stop, and remove the index."""
        self._follower.close()
        self._scratch.close()

    def written_in(self, seconds: float) -> set[str]:
        """Ids of the runs that were brought up to date in the last seconds, so many; they are dated as their spools are."""
        return self._follower.written_in(seconds)

    def spools_of(self, run_id: str) -> ShownSpools:
        """What was read of each spool of a run, and what could not be."""
        return self._follower.spools_of(run_id)


class ReadOnly:
    """Refuses whatever is not a mere question."""

    def __init__(self, app: ASGIApp, root: Path) -> None:
        self._app = app
        self._detail = (
            f"this service shows the folder {root}, read-only; send it to a service that keeps runs: `tsemon serve "
            "--database URL`, and `tsemon sync` for what the folder holds"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_question = scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS") or _tries(scope)
        await (self._app if is_question else problem_response(403, "read_only", self._detail))(scope, receive, send)


def _tries(scope: Scope) -> bool:
    """A question that is too long for an address."""
    return scope["method"] == "POST" and scope["path"] in (f"{API}/rules/test", f"{API}/rules/check")
