"""The state of a monitor in the checkpoints of a trainer."""

from __future__ import annotations

import tsemon
from tsemon.errors import TsemonError

LOSSES_UNKNOWN = "losses before the checkpoint are unknown, so a jump right after it is not detected: {error}"


def continue_from(monitor: tsemon.Monitor, saved: object) -> None:
    """Let the monitor remember what `state_dict` returned in a run of the same name. Its own step stays."""
    here = monitor.state_dict()
    if isinstance(saved, dict) and (saved.get("project"), saved.get("run")) == (here["project"], here["run"]):
        try:
            monitor.load_state_dict(saved | {"step": here["step"]})
        except TsemonError as error:
            monitor.warn(LOSSES_UNKNOWN.format(error=error))
