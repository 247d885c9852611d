"""The state of a monitor in the checkpoints of a trainer."""

from __future__ import annotations

import tsemon

SAME = "project", "run", "step"


def continue_from(monitor: tsemon.Monitor, saved: object) -> None:
    """Let the monitor remember what `state_dict` returned, if that was at the same step of a run of the same name."""
    here = monitor.state_dict()
    if isinstance(saved, dict) and all(saved.get(key) == here[key] for key in SAME):
        monitor.load_state_dict(saved)
