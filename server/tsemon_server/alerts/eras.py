"""Which rules read which steps of an attempt. An edited rule counts from the next step on, and for no step before.

If frames are read again, after a restart or for a late frame, the same rules read them again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from tsemon_server.alerts.active import ActiveRules, InForce
from tsemon_server.rules.state import State
from tsemon_server.store.ledger.progress import Progress
from tsemon_server.store.reading import Reader
from tsemon_server.store.writing import Writer


class Era(NamedTuple):
    """Rules, and the last step that they read; None for the rules that read the next one."""

    rules: InForce
    until: int | None


def eras_after(
    step: int, unit: Reader | Writer, active: ActiveRules, run_id: str, attempt: int, progress: Progress
) -> list[Era]:
    """The eras with later steps, the oldest first. If the rules were edited since the last reading, the last era is new."""
    known, now = unit.progress.eras(run_id, attempt), active.of_run(unit, run_id)
    ends = [(one.versions, next_one.after_step) for one, next_one in pairwise(known)]
    if known and known[-1].versions != now.versions:
        ends.append((known[-1].versions, progress.read_to))
    past = [Era(active.of_versions(unit.rules, versions), until) for versions, until in ends if until > step]
    return [*past, Era(now, None)]


def handed_over(state: State, before: InForce, now: InForce) -> State:
    """The state of rules, for the rules that read the next steps. A rule of the same name keeps its alert."""
    if before.evaluator is now.evaluator:
        return state
    return now.evaluator.load(before.evaluator.dump(state))
