"""The state of the rules for an attempt, restored from the store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from tsemon_server.rules.evaluator import Evaluator, Event
from tsemon_server.rules.state import State, UnreadableState
from tsemon_server.rules.views import views_in_order
from tsemon_server.store.ledger.progress import START, Checkpoint, Progress
from tsemon_server.store.reading import Reader

log = logging.getLogger(__name__)

FRAMES_AT_ONCE = 256
"""Frames of an attempt that the rules read in one go."""


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


class Past(NamedTuple):
    """Steps of an attempt that were read again, without a transaction that writes."""

    claimed: Progress
    evaluator: Evaluator
    start: Checkpoint
    state: State
    read_to: int
    num_read: int
    num_skipped: int
    events: list[Event]
    checkpoints: list[Checkpoint]


def past_of(
    reader: Reader, evaluator: Evaluator, run_id: str, attempt: int, claimed: Progress, is_stopped: Callable[[], bool]
) -> Past | None:
    """Read again from before the first late frame that was claimed; None if stopped."""
    assert claimed.claimed_from is not None
    start = reader.progress.before(run_id, attempt, claimed.claimed_from)
    state = recalled(evaluator, start, run_id)
    if state is None:  # then all is read again
        start, state = START, evaluator.start()
    frames = reader.frames.after(run_id, attempt, start.step, claimed.read_to)
    views = views_in_order(frames, *reader.runs.model(run_id, attempt))
    past = Past(claimed, evaluator, start, state, start.step, start.num_read, 0, [], [])
    while some := [*islice(views, FRAMES_AT_ONCE)]:
        if is_stopped():
            return None
        num_skipped = 0
        try:
            past.events.extend(evaluator.read([(state, some)])[0])
        except Exception:  # one frame is no reason to skip the others
            for view in some:
                try:
                    past.events.extend(evaluator.advance(state, view))
                except Exception:
                    log.exception("the rules failed at step %d of run %s; they skip this frame", view.step, run_id)
                    num_skipped += 1
        past = past._replace(
            read_to=some[-1].step, num_read=past.num_read + len(some), num_skipped=past.num_skipped + num_skipped
        )
        past.checkpoints.append(Checkpoint(past.read_to, past.num_read, evaluator.dump(state)))
    return past
