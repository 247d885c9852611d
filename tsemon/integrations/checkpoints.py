"""What a trainer's checkpoint keeps of a monitor."""

from __future__ import annotations

from tsemon.monitor import Monitor

SAME = "project", "run", "step"


def continue_from(monitor: Monitor, saved: object) -> None:
    """Let the monitor remember what `state_dict` returned, if that was at the same step of a run of the same name."""
    here = monitor.state_dict()
    if isinstance(saved, dict) and all(saved.get(key) == here[key] for key in SAME):
        monitor.load_state_dict(saved)
