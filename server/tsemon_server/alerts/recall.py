"""The state of the rules for an attempt, restored from the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from tsemon_server.alerts.active import ActiveRules, InForce
from tsemon_server.alerts.eras import Era, eras_after, handed_over
from tsemon_server.rules.evaluator import Evaluator, Event
from tsemon_server.rules.program import View
from tsemon_server.rules.state import State, UnreadableState
from tsemon_server.rules.views import views_in_order
from tsemon_server.store.ledger.progress import START, Checkpoint, Progress
from tsemon_server.store.reading import Reader
from tsemon_server.store.writing import Writer

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


def read_one_by_one(
    read: Callable[[Sequence[View]], list[Event]],
    views: Sequence[View],
    run_id: str,
    on_error: Callable[[], None] = lambda: None,
) -> tuple[list[Event], int]:
    """The events of frames on which the rules failed together, and the number of frames on which they fail alone."""
    events, num_skipped = list[Event](), 0
    for view in views:
        try:
            events += read([view])
        except Exception:  # a rule is no reason to lose frames
            log.exception("the rules failed at step %d of run %s; they skip this frame", view.step, run_id)
            on_error()
            num_skipped += 1
    return events, num_skipped


def state_now(
    unit: Reader | Writer,
    active: ActiveRules,
    run_id: str,
    attempt: int,
    progress: Progress,
    on_error: Callable[[], None] = lambda: None,
) -> State | None:
    """The state after the last step that the rules have read, from the newest checkpoint and the frames since; None if
    the checkpoint cannot be read."""
    start = unit.progress.before(run_id, attempt, progress.read_to + 1)
    eras = eras_after(start.step, unit, active, run_id, attempt, progress)
    state = recalled(eras[0].rules.evaluator, start, run_id, on_error)
    if state is None or (start.step == progress.read_to and len(eras) == 1):
        return state
    again = _again(unit, eras, state, (run_id, attempt), start.step, progress.read_to)
    for rules, state, views in again:
        _read(rules.evaluator, state, views, run_id)
    return state


class Past(NamedTuple):
    """Steps of an attempt that were read again, without a transaction that writes."""

    claimed: Progress
    start: Checkpoint
    num_eras: int
    """Number of eras, from `start` on, that have read the steps."""
    rules: InForce
    """The rules that read the last of the steps."""
    state: State
    read_to: int
    num_read: int
    num_skipped: int
    events: list[tuple[InForce, list[Event]]]
    """In the order of steps, with the rules that they are of."""
    checkpoints: list[Checkpoint]


def past_of(
    reader: Reader, active: ActiveRules, run_id: str, attempt: int, claimed: Progress, is_stopped: Callable[[], bool]
) -> Past | None:
    """Read again from before the first late frame that was claimed; None if stopped."""
    assert claimed.claimed_from is not None
    start = reader.progress.before(run_id, attempt, claimed.claimed_from)
    eras = eras_after(start.step, reader, active, run_id, attempt, claimed)
    kept = recalled(eras[0].rules.evaluator, start, run_id)
    if kept is None:  # then all is read again
        start, eras = START, eras_after(START.step, reader, active, run_id, attempt, claimed)
        kept = eras[0].rules.evaluator.start()
    # The next era reads later steps, even if another process has read some of them since the claim.
    eras = [*eras[:1], *(era for before, era in pairwise(eras) if (before.until or 0) < claimed.read_to)]
    past = Past(claimed, start, len(eras), eras[0].rules, kept, start.step, start.num_read, 0, [], [])
    for rules, state, views in _again(reader, eras, kept, (run_id, attempt), start.step, claimed.read_to):
        if is_stopped():
            return None
        if rules is not past.rules and past.checkpoints:  # the last one is from before the edit
            past.checkpoints[-1] = past.checkpoints[-1]._replace(state=rules.evaluator.dump(state))
        past = _longer(past._replace(rules=rules, state=state), views, run_id)
    return past


def _longer(past: Past, views: Sequence[View], run_id: str) -> Past:
    if not views:
        return past
    rules, state = past.rules, past.state
    events, num_skipped = _read(rules.evaluator, state, views, run_id)
    past.events.append((rules, events))
    read_to, num_read = views[-1].step, past.num_read + len(views)
    past.checkpoints.append(Checkpoint(read_to, num_read, rules.evaluator.dump(state)))
    return past._replace(read_to=read_to, num_read=num_read, num_skipped=past.num_skipped + num_skipped)


def _read(evaluator: Evaluator, state: State, views: Sequence[View], run_id: str) -> tuple[list[Event], int]:
    """The events, and the number of frames on which the rules failed."""

    def read(some: Sequence[View]) -> list[Event]:
        return evaluator.read([(state, some)])[0]

    try:
        return read(views), 0
    except Exception:  # one frame is no reason to skip the others
        return read_one_by_one(read, views, run_id)


def _again(
    unit: Reader | Writer, eras: Sequence[Era], state: State, which: tuple[str, int], start: int, end: int
) -> Iterator[tuple[InForce, State, Sequence[View]]]:
    """The frames after the step `start`, and the rules that are to read them: for each era at least once, with or without
    frames."""
    model, before = unit.runs.model(*which), eras[0].rules
    for rules, until in eras:
        state = handed_over(state, before, rules)
        last = end if until is None else min(until, end)
        frames = unit.frames.after(*which, start, last, own=rules.evaluator.own_scalars)
        views = views_in_order(frames, *model)
        some = [*islice(views, FRAMES_AT_ONCE)]
        yield rules, state, some
        while some := [*islice(views, FRAMES_AT_ONCE)]:
            yield rules, state, some
        before, start = rules, last
