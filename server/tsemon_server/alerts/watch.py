"""Lets the rules read each new frame of a run, and keeps the alerts that come of it.

Runs inside the transaction that stores the frames: an alert is visible before the frame that caused it is acknowledged,
and a server that dies in between has stored neither. What the rules remember is stored too: a restart forgets nothing.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tsemon.wire import Frame
from tsemon_server.alerts.active import ActiveRules, InForce
from tsemon_server.alerts.book import AlertBook
from tsemon_server.rules.evaluator import Evaluator
from tsemon_server.rules.state import State, UnreadableState
from tsemon_server.rules.views import views_of
from tsemon_server.store.ledger.runs import Model
from tsemon_server.store.writing import Writer

log = logging.getLogger(__name__)

CHECKPOINT_FRAMES = 16
"""What the rules remember is kept every so many frames, and the two newest of these stay: so far back a frame may come."""
KNOWN_ATTEMPTS = 512


@dataclass
class _Known:
    """A state as it was last stored, and what it is: whether it is still the one in the database takes one comparison."""

    raw: bytes
    evaluator: Evaluator
    state: State


class Watch:
    """The rules at work. `on_error` is told when they failed, `on_read` how many seconds they took for a frame."""

    def __init__(
        self,
        active: ActiveRules,
        on_error: Callable[[], None] = lambda: None,
        on_read: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._active = active
        self._on_error, self._on_read = on_error, on_read
        self._known: OrderedDict[tuple[str, int], _Known] = OrderedDict()

    def observe(self, writer: Writer, run_id: str, attempt: int, frames: Sequence[Frame]) -> list[int]:
        """Let the rules read new `frames` of an attempt, which are stored; the ids of the alerts this resolved."""
        in_force = self._active.of_run(writer, run_id)
        state = self._state(writer, in_force.evaluator, run_id, attempt)
        model = writer.runs.model(run_id, attempt)
        book = AlertBook(writer.alerts, run_id, attempt, in_force.versions)
        last_step = -1 if state.last_step is None else state.last_step
        late = [frame.step for frame in frames if frame.step <= last_step]
        before = self._before(writer, in_force.evaluator, run_id, attempt, late, state) if late else None
        if before is not None:
            # From before the late frames on, all that is stored: the frames at hand are among it.
            state, since_step = before, -1 if before.last_step is None else before.last_step
            frames = writer.frames.after(run_id, attempt, since_step)
            book.go_back_to(since_step, in_force.evaluator.rules)
        self._read(writer, in_force, state, book, frames, model)
        book.close()
        self._keep(writer, in_force.evaluator, state, run_id, attempt)
        return book.resolved

    def _read(
        self,
        writer: Writer,
        in_force: InForce,
        state: State,
        book: AlertBook,
        frames: Sequence[Frame],
        model: Model,
    ) -> None:
        for view in views_of(frames, *model):
            began = time.perf_counter()
            try:
                events = in_force.evaluator.advance(state, view)
            except Exception:  # a rule is no reason to lose frames
                log.exception("the rules failed at step %d of run %s; they skip this frame", view.step, book.run_id)
                self._on_error()
                continue
            self._on_read(time.perf_counter() - began)
            for event in events:
                book.enter(event)
            if state.num_samples % CHECKPOINT_FRAMES == 0 and state.last_step == view.step:
                writer.rules.keep_checkpoint(book.run_id, book.attempt, view.step, in_force.evaluator.dump(state))

    def _state(self, writer: Writer, evaluator: Evaluator, run_id: str, attempt: int) -> State:
        stored = writer.rules.state(run_id, attempt)
        if stored is None:
            return evaluator.start()
        known = self._known.pop((run_id, attempt), None)
        if known is not None and known.raw == stored and known.evaluator is evaluator:
            return known.state
        return self._loaded(evaluator, stored, run_id)

    def _loaded(self, evaluator: Evaluator, raw: bytes, run_id: str) -> State:
        try:
            return evaluator.load(raw)
        except UnreadableState as error:
            log.error("what the rules remembered of run %s cannot be read, they start anew: %s", run_id, error)
            self._on_error()
            return evaluator.start()

    def _before(
        self, writer: Writer, evaluator: Evaluator, run_id: str, attempt: int, late: Sequence[int], now: State
    ) -> State | None:
        """What the rules remembered before the `late` steps. Those that are too long ago are stored and not judged; None
        where all are."""
        kept = [(checkpoint.step, checkpoint.state) for checkpoint in writer.rules.checkpoints(run_id, attempt)]
        if now.num_samples < 2 * CHECKPOINT_FRAMES:
            kept.append((-1, evaluator.dump(evaluator.start())))
        judged = [step for step in late if any(kept_step < step for kept_step, _ in kept)]
        if not judged:
            return None
        return next(self._loaded(evaluator, raw, run_id) for kept_step, raw in kept if kept_step < min(judged))

    def _keep(self, writer: Writer, evaluator: Evaluator, state: State, run_id: str, attempt: int) -> None:
        raw = evaluator.dump(state)
        writer.rules.keep_state(run_id, attempt, raw)
        self._known[run_id, attempt] = _Known(raw, evaluator, state)
        while len(self._known) > KNOWN_ATTEMPTS:
            self._known.popitem(last=False)
