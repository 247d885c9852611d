"""Lets the rules read the frames of each attempt in the order of steps, and keeps the alerts that come of it.

Runs inside the transaction that stores the frames: an alert is visible before the frame that caused it is acknowledged,
and a server that dies in between has stored neither. If an attempt has several writers, a step waits until all of them have
passed it, for a short time at most. A frame that comes later takes the rules back to before it: immediately if only a few
steps are read again, otherwise in the next round of the clock.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from itertools import islice, pairwise
from typing import NamedTuple

from tsemon.errors import StoreError
from tsemon.wire import Frame
from tsemon_server.alerts.active import ActiveRules, InForce
from tsemon_server.alerts.book import AlertBook
from tsemon_server.alerts.eras import Era, eras_after, handed_over
from tsemon_server.alerts.recall import FRAMES_AT_ONCE, Past, past_of, read_one_by_one, recalled, state_now
from tsemon_server.rules.evaluator import Evaluator, Event
from tsemon_server.rules.program import View
from tsemon_server.rules.state import State
from tsemon_server.rules.views import views_in_order, views_of
from tsemon_server.store import Store
from tsemon_server.store.ledger.progress import (
    MOST_PAUSE_S,
    MOST_REREAD,
    REACH,
    SPACING,
    Checkpoint,
    Progress,
    RuleEra,
    Seen,
)
from tsemon_server.store.ledger.runs import Model
from tsemon_server.store.writing import Writer

log = logging.getLogger(__name__)

DELAY_S = 10.0
"""Seconds that a step waits for writers that have not passed it."""
AT_ONCE = 64
"""Maximum number of steps that are read again immediately for a late frame. The next round of the clock reads more."""
REREAD_S = 1e-3
"""Pause before steps are read again, for each of them: late frames take a tenth of a processor at most."""
KNOWN_ATTEMPTS = 512
MOST_WRITERS = 256
"""Maximum number of writers of an attempt that others wait for. The most recent ones count."""
MOST_DUE = 256


class _Known(NamedTuple):
    """The memory of a process of one attempt, after one reading."""

    revision: int
    rules: InForce
    model: Model
    state: State
    kept_at: int
    """How many steps had been read at the newest checkpoint."""


class Watch:
    """The rules at work. `on_error` is told when they failed, `on_read` how many seconds they took for how many frames."""

    def __init__(
        self,
        active: ActiveRules,
        on_error: Callable[[], None] = lambda: None,
        on_read: Callable[[float, int], None] = lambda _seconds, _num_frames: None,
    ) -> None:
        self.active = active
        self.on_error, self.on_read = on_error, on_read
        self.known: OrderedDict[tuple[str, int], _Known] = OrderedDict()

    def observe(self, writer: Writer, run_id: str, attempt: int, sender: str, frames: Sequence[Frame]) -> list[int]:
        """Let the rules read new `frames` of an attempt, which are stored; the ids of the alerts this resolved."""
        return self.finish([self.begin(writer, run_id, attempt, sender, frames)])[0]

    def begin(self, writer: Writer, run_id: str, attempt: int, sender: str, frames: Sequence[Frame]) -> Reading:
        """Prepare to read new `frames` of an attempt, which are stored. Nothing else may read it before `finish`."""
        reading = Reading(self, writer, run_id, attempt)
        reading.hear(sender, frames)
        return reading

    def finish(self, readings: Sequence[Reading]) -> list[list[int]]:
        """Let the rules read all prepared frames of a transaction together; the ids of the alerts that each resolved."""
        by_evaluator: dict[Evaluator, list[Reading]] = {}
        for reading in readings:
            by_evaluator.setdefault(reading.evaluator, []).append(reading)
        for evaluator, some in by_evaluator.items():
            self._read_together(evaluator, [reading for reading in some if reading.views])
        return [reading.close() for reading in readings]

    def _read_together(self, evaluator: Evaluator, readings: Sequence[Reading]) -> None:
        """Read them all, unless the rules fail: then each reading does it by itself."""
        began = time.perf_counter()
        try:
            found = evaluator.read([(reading.state, reading.views) for reading in readings])
        except Exception:  # one frame is no reason to skip the others
            return
        self.on_read(time.perf_counter() - began, sum(len(reading.views) for reading in readings))
        for reading, events in zip(readings, found, strict=True):
            reading.take(events)

    def end(self, writer: Writer, run_id: str, attempt: int) -> None:
        """Let the rules read the frames that wait for other writers, because the attempt ends."""
        progress = writer.progress.of(run_id, attempt)
        if progress is not None and progress.waiting_since is not None:
            reading = Reading(self, writer, run_id, attempt)
            reading.flush(is_over=True)
            self.finish([reading])

    def look(self, store: Store, now: float, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Catch up with all attempts for which it is time."""
        with store.read() as reader:
            due = reader.progress.due(now, MOST_DUE)
        for run_id, attempt in due:
            if is_stopped():
                return
            try:
                self._catch_up(store, run_id, attempt, is_stopped)
            except StoreError:
                raise
            except Exception:  # of one attempt: the others do not wait for it
                log.exception("the rules could not catch up with run %s", run_id)

    def _catch_up(self, store: Store, run_id: str, attempt: int, is_stopped: Callable[[], bool]) -> None:
        """Let the rules read the frames that have waited, and late frames in their place.

        Late frames may be far back. Therefore the rules read from there on before the transaction that writes, because
        other runs wait for this transaction. In the meantime the attempt is evaluated without the late frames.
        """
        with store.write() as writer:
            if not writer.runs.hold(run_id):
                return
            reading = Reading(self, writer, run_id, attempt)
            reading.flush()
            claimed = reading.claim()
            self.finish([reading])
        if claimed is None:
            return
        with store.read() as reader:
            past = past_of(reader, self.active, run_id, attempt, claimed, is_stopped)
        if past is None:
            return
        with store.write() as writer:
            if writer.runs.hold(run_id):
                reading = Reading(self, writer, run_id, attempt)
                reading.replace(past)
                self.finish([reading])


class Reading:
    """The rules at work on one attempt, in one transaction."""

    views: list[View]
    """The next frames to be read."""
    _rest: Iterator[View]

    def __init__(self, watch: Watch, writer: Writer, run_id: str, attempt: int) -> None:
        self._watch, self._writer = watch, writer
        self._which = run_id, attempt
        self._rules = watch.active.of_run(writer, run_id)
        """The rules that read the next frames."""
        self._known = watch.known.pop(self._which, None)
        self._model = writer.runs.model(run_id, attempt) if self._known is None else self._known.model
        self._book = AlertBook(writer.alerts, run_id, attempt, self._rules)
        self._progress = writer.progress.of(run_id, attempt) or Progress()
        self._keeps = False
        """Whether to keep a checkpoint after the last step, however soon after the one before."""
        self._reread = 0
        """Steps that are to be read again, or were."""
        self._late_at = None if self._progress.late_from is None else self._progress.due_at
        self._context = copy_context()
        """The context of the request, with the id for the log."""

    @property
    def evaluator(self) -> Evaluator:
        return self._rules.evaluator

    def hear(self, sender: str, frames: Sequence[Frame]) -> None:
        """Find the frames to read now that these have come."""
        before = self._progress
        self._note_writer(sender, max(frame.step for frame in frames))
        late = [frame.step for frame in frames if frame.step <= before.read_to]
        self._num_late = len(late)
        back_to = self._judged_now(late) if late else None
        if back_to is not None and self._may_be_edited():
            self._go_to(None)  # first notes what was edited
        self._go_to(back_to)
        horizon = max(self._horizon(), before.read_to)
        if before.waiting_since is not None or self._progress.read_to < before.read_to:
            self._prepare(self._stored(horizon))
        else:
            new = [frame for frame in frames if before.read_to < frame.step <= horizon]
            self._prepare(views_of(self._with_rows(new, before.read_to), *self._model))
        self._note_waiting(horizon)

    def flush(self, *, is_over: bool = False) -> None:
        """Find the frames to read that have waited long enough, or all that wait if the attempt `is_over`."""
        self._go_to(None)
        horizon = max(self._newest_step() if is_over else self._horizon(), self._progress.read_to)
        self._prepare(self._stored(horizon))
        self._note_waiting(horizon)

    def claim(self) -> Progress | None:
        """Claim the late frames; None without late frames. An earlier claim is of a process that died, or is slow."""
        progress = self._progress
        starts = [step for step in (progress.late_from, progress.claimed_from) if step is not None]
        if not starts:
            return None
        self._progress = progress._replace(late_from=None, claimed_from=min(starts), claim=secrets.randbits(62))
        return self._progress

    def replace(self, past: Past) -> None:
        """Continue from a past that was read again, with its alerts, and find the frames that came since."""
        progress = self._progress
        if progress.claim != past.claimed.claim:  # another process has claimed them since
            self.flush()
            return
        if self._may_be_edited():
            self._go_to(None)  # first notes what was edited
        eras = self._eras_after(past.start.step)
        self._writer.progress.forget_checkpoints(*self._which, past.start.step + 1)
        for kept in past.checkpoints:
            self._writer.progress.keep_checkpoint(*self._which, kept)
        self._book.go_back_to(past.start.step, _names(eras))
        for rules, events in past.events:
            self._book.go_on_with(rules)
            for event in events:
                self._book.enter(event)
        self._rules, self.state, self._kept_at = past.rules, past.state, past.num_read
        self._progress = progress._replace(
            read_to=past.read_to,
            num_read=past.num_read,
            claimed_from=None,
            claim=None,
            num_late=progress.num_late - past.claimed.num_late,
            num_skipped=progress.num_skipped + past.num_skipped,
        )
        self._go_through(eras[past.num_eras - 1 :])
        self._reread = past.num_read - past.start.num_read
        horizon = max(self._horizon(), progress.read_to)
        self._prepare(self._stored(horizon))
        self._note_waiting(horizon)

    def close(self) -> list[int]:
        """Read the remaining frames and record the progress; the ids of alerts that ended."""
        return self._context.run(self._close)

    def _close(self) -> list[int]:
        self._read_all()
        if self._keeps:
            self._keep_checkpoint()
        self._book.close()
        due = []
        if self._progress.waiting_since is not None:
            due.append(self._progress.waiting_since + DELAY_S)
        if self._progress.late_from is not None:  # the first of them sets the time
            pause_s = min(REREAD_S * self._reread, MOST_PAUSE_S)
            due.append(self._late_at if self._late_at is not None else self._writer.now + pause_s)
        elif self._progress.claimed_from is not None:  # if the process that reads them dies
            due.append(self._writer.now + MOST_PAUSE_S)
        due_at = min(due, default=None)
        revision = secrets.randbits(62)
        self._progress = self._progress._replace(revision=revision, due_at=due_at)
        self._writer.progress.keep(*self._which, self._progress)
        known = self._watch.known
        known[self._which] = _Known(revision, self._rules, self._model, self.state, self._kept_at)
        while len(known) > KNOWN_ATTEMPTS:
            known.popitem(last=False)
        return self._book.resolved

    # -- which steps

    def _note_writer(self, sender: str, step: int) -> None:
        writers = dict(self._progress.writers)
        known = writers.pop(sender, None)
        writers[sender] = Seen(step if known is None else max(step, known.step), self._writer.now)
        read = [name for name, seen in writers.items() if seen.step <= self._progress.read_to]
        for name in sorted(read, key=lambda name: writers[name].heard_at)[: max(0, len(writers) - MOST_WRITERS)]:
            del writers[name]
        self._progress = self._progress._replace(writers=writers)

    def _newest_step(self) -> int:
        return max((seen.step for seen in self._progress.writers.values()), default=self._progress.read_to)

    def _horizon(self) -> int:
        """The last step that does not wait for a writer."""
        now, since = self._writer.now, self._progress.waiting_since
        heard_since = now - DELAY_S
        # A time in the future is of a clock that was set back.
        live = [seen.step for seen in self._progress.writers.values() if heard_since < seen.heard_at <= now + DELAY_S]
        has_waited = since is not None and not heard_since < since <= now
        return self._newest_step() if has_waited or not live else min(live)

    def _note_waiting(self, horizon: int) -> None:
        since = self._progress.waiting_since
        waits = self._newest_step() > horizon
        now = self._writer.now
        # After a delay the rest begins to wait anew.
        since = (now if since is None or not now - DELAY_S < since <= now else since) if waits else None
        self._progress = self._progress._replace(waiting_since=since)

    def _judged_now(self, late: Sequence[int]) -> int | None:
        """The step before which the rules have to go back now. Frames that are too late for that are noted."""
        kept, progress = self._writer.progress.checkpoint_steps(*self._which), self._progress

        def reread(step: int) -> int:
            return progress.num_read - next((num_read for kept_step, num_read in kept if kept_step < step), 0)

        in_reach = {step for step in {*late} if reread(step) <= MOST_REREAD}
        num_skipped = sum(step not in in_reach for step in late)
        if num_skipped:
            log.warning(
                "%d frames of run %s came more than %d steps late; no rule reads them",
                num_skipped,
                self._which[0],
                REACH,
            )
            self._progress = progress = progress._replace(num_skipped=progress.num_skipped + num_skipped)
        if not in_reach:
            return None
        first = min(in_reach)
        self._reread = reread(first)
        late_from = first if progress.late_from is None else min(first, progress.late_from)
        if progress.claimed_from is None and self._reread <= max(AT_ONCE, 2 * len(late)):
            return first
        self._progress = progress._replace(late_from=late_from, num_late=progress.num_late + len(late) - num_skipped)
        return None

    def _stored(self, horizon: int) -> Iterator[View]:
        if horizon <= self._progress.read_to:
            return iter(())
        own = self.evaluator.own_scalars
        found = self._writer.frames.after(*self._which, self._progress.read_to, horizon, own=own)
        return views_in_order(found, *self._model)

    def _with_rows(self, frames: Sequence[Frame], read_to: int) -> Iterable[Frame]:
        """The frames after `read_to`, with the user's own scalars of the steps between them that the rules read."""
        own = self.evaluator.own_scalars
        if not frames or not own:
            return frames
        in_order = sorted(frames, key=lambda frame: frame.step)
        return self._writer.frames.with_newest(*self._which, in_order, read_to, in_order[-1].step, own)

    # -- what is remembered

    def _go_to(self, step: int | None) -> None:
        """Restore the state of the rules before `step`, or without one, after the last step that they have read."""
        if step is None:
            is_edited = self._may_be_edited()
            self._restore()
            if is_edited:
                self._restart_rules()
            return
        found = self._writer.progress.before(*self._which, step)
        eras = self._eras_after(found.step)
        self._begin_era()
        state = recalled(eras[0].rules.evaluator, found, self._which[0], self._watch.on_error)
        if state is None:
            self.state = self._begin_anew()
            return
        self.state, self._kept_at = state, found.num_read
        self._writer.progress.forget_checkpoints(*self._which, found.step + 1)
        self._book.go_back_to(found.step, _names(eras))
        self._progress = self._progress._replace(read_to=found.step, num_read=found.num_read)
        self._rules = eras[0].rules  # which read the checkpoint
        self._go_through(eras)

    def _may_be_edited(self) -> bool:
        """Whether rules could have been edited since the last reading."""
        return self._known is None or self._known.rules.versions is not self._rules.versions

    def _restore(self) -> None:
        """Restore the state of the rules after the last step that they have read."""
        known = self._known
        if known is not None and known.revision == self._progress.revision:
            self.state, self._kept_at = handed_over(known.state, known.rules, self._rules), known.kept_at
            if known.rules.evaluator is not self.evaluator:
                self._begin_era()
            return
        state = state_now(self._writer, self._watch.active, *self._which, self._progress, self._watch.on_error)
        self._begin_era()
        # Where several processes take turns, the next one finds all in the store.
        self._keeps |= self._progress.num_read > 0
        self._kept_at = -1
        self.state = self._begin_anew() if state is None else state

    def _restart_rules(self) -> None:
        """Restart rules that were disabled and are active again: their alerts have ended."""
        states = (self.state, *self.state.others)
        firing = {
            rule.name
            for place, rule in enumerate(self.evaluator.rules)
            if any(state.tracks[place].state == "firing" for state in states)
        }
        restarted = firing and firing & self._writer.alerts.ended_by_disabling(*self._which)
        if not restarted:
            return
        rules, versions = self._rules, self._rules.versions
        others = {name: version for name, version in versions.items() if name not in restarted}
        for part in (others, versions):
            self._writer.progress.begin_era(*self._which, RuleEra(self._progress.read_to, part))
        self._enter(self._watch.active.of_versions(self._writer.rules, others))
        self._enter(rules)
        self._kept_at = -1
        self._keep_checkpoint()

    def _begin_anew(self) -> State:
        """Begin with the next frame, because the state of the rules cannot be read. Then all frames are read again."""
        self._writer.progress.forget_checkpoints(*self._which, 0)
        self._keeps, self._kept_at = True, -1
        self._progress = self._progress._replace(late_from=0)
        return self.evaluator.start()

    def _eras_after(self, step: int) -> list[Era]:
        return eras_after(step, self._writer, self._watch.active, *self._which, self._progress)

    def _begin_era(self) -> None:
        """Note that the next steps are read by other rules than the last ones, if they are."""
        known, versions = self._writer.progress.eras(*self._which), self._rules.versions
        if not known or known[-1].versions != versions:
            after_step = self._progress.read_to if known else -1
            self._writer.progress.begin_era(*self._which, RuleEra(after_step, versions))
            self._keeps = True

    def _go_through(self, eras: Sequence[Era]) -> None:
        """Let the rules of each era but the last read its steps."""
        self._enter(eras[0].rules)
        for earlier, later in pairwise(eras):
            assert earlier.until is not None
            self._prepare(self._stored(earlier.until))
            self._read_all()
            self._enter(later.rules)
            if self._kept_at == self._progress.num_read:  # the checkpoint is from before
                self._kept_at = -1
                self._keep_checkpoint()

    def _enter(self, rules: InForce) -> None:
        self.state = handed_over(self.state, self._rules, rules)
        self._rules = rules
        self._book.go_on_with(rules)

    def _keep_checkpoint(self) -> None:
        progress = self._progress
        if progress.num_read > self._kept_at:
            self._kept_at = progress.num_read
            kept = Checkpoint(progress.read_to, progress.num_read, self.evaluator.dump(self.state))
            self._writer.progress.keep_checkpoint(*self._which, kept)

    # -- reading

    def _prepare(self, views: Iterator[View]) -> None:
        self._rest = views
        self.views = [*islice(views, FRAMES_AT_ONCE)]

    def take(self, events: Sequence[Event]) -> None:
        """Note that the rules have read the next frames, with these events."""
        self._context.run(self._take, events)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._book.enter(event)
        num_read = self._progress.num_read + len(self.views)
        self._progress = self._progress._replace(read_to=self.views[-1].step, num_read=num_read)
        self.views = [*islice(self._rest, FRAMES_AT_ONCE)]
        if num_read - self._kept_at >= SPACING:
            self._keep_checkpoint()

    def _read_all(self) -> None:
        while self.views:
            try:
                events = self._events(self.views)
            except Exception:  # one frame is no reason to skip the others
                events, num_failed = read_one_by_one(self._events, self.views, self._which[0], self._watch.on_error)
                self._progress = self._progress._replace(num_skipped=self._progress.num_skipped + num_failed)
            self._take(events)

    def _events(self, views: Sequence[View]) -> list[Event]:
        began = time.perf_counter()
        (events,) = self.evaluator.read([(self.state, views)])
        self._watch.on_read(time.perf_counter() - began, len(views))
        return events


def _names(eras: Sequence[Era]) -> set[str]:
    return {rule.name for era in eras for rule in era.rules.evaluator.rules}
