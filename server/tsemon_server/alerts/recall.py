"""The state of the rules for an attempt, restored from the store."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.state import State, UnreadableState
from tsemon_server.rules.views import views_in_order
from tsemon_server.store.ledger.progress import Checkpoint
from tsemon_server.store.reading import Reader

log = logging.getLogger(__name__)


def recalled(
    evaluator: Evaluator, checkpoint: Checkpoint, run_id: str, on_error: Callable[[], None] = lambda: None
) -> State | None:
    """The state of a checkpoint; None if it cannot be read."""
    if checkpoint.state is None:
        return evaluator.start()
    try:
        return evaluator.load(checkpoint.state)
    except UnreadableState as error:
        log.error("the state of the rules for run %s cannot be read, so they start again: %s", run_id, error)
        on_error()
        return None


def state_now(reader: Reader, evaluator: Evaluator, run_id: str, attempt: int) -> State:
    """The state after the last step that the rules have read, from the newest checkpoint and the frames since."""
    progress = reader.progress.of(run_id, attempt)
    if progress is None:
        return evaluator.start()
    checkpoint = reader.progress.before(run_id, attempt, progress.read_to + 1)
    state = recalled(evaluator, checkpoint, run_id)
    if state is None:
        return evaluator.start()
    frames = reader.frames.after(run_id, attempt, checkpoint.step, progress.read_to)
    evaluator.read([(state, [*views_in_order(frames, *reader.runs.model(run_id, attempt))])])
    return state
